// Python's view of the work of attention on a GPU. Everything is checked here, once.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <optional>
#include <span>
#include <tuple>

#include "bind.h"
#include "gpu_work.h"

namespace nb = nanobind;

namespace headrace {
namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using List = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ancestors = nb::ndarray<const uint64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::span<const int32_t> span_of(const Ints& ints) { return {ints.data(), ints.size()}; }

template <class T>
std::span<T> records_of(const Table& table, const char* wrong) {
  require(table.shape(1) * sizeof(int32_t) == sizeof(T), wrong);
  return {reinterpret_cast<T*>(table.data()), table.shape(0)};
}

void check_rows(const Ints& row_start, const Ints& context, const Ints& scheduled, size_t rows) {
  const size_t seqs = context.size();
  require(row_start.size() == seqs + 1 && scheduled.size() == seqs,
          "a batch needs row_start [B + 1] and scheduled_len [B]");
  require(row_start.data()[0] == 0, "the rows of a batch begin at 0");
  for (size_t seq = 0; seq < seqs; seq++) {
    const int64_t num = static_cast<int64_t>(row_start.data()[seq + 1]) - row_start.data()[seq];
    require(num >= 1 && scheduled.data()[seq] >= 0 && scheduled.data()[seq] <= num,
            "a sequence has rows, and no more known rows than these");
    require(context.data()[seq] >= 0 && context.data()[seq] < 1 << 30,
            "a context has between 0 and 2^30 tokens");
  }
  require(static_cast<size_t>(row_start.data()[seqs]) <= rows,
          "there is no room for the records of all rows");
}

GpuWork make_work(int rows_per_tile, int units_per_item, int programs, int split, int window,
                  int sink_tokens) {
  require(rows_per_tile > 0 && units_per_item > 0 && programs > 0 && split > 0,
          "tiles, units, programs and splits are positive");
  require(window >= 0 && sink_tokens >= 0 && (window || !sink_tokens),
          "sinks are kept beside a window");
  return GpuWork({rows_per_tile, units_per_item, programs, split, window, sink_tokens});
}

std::tuple<int, int, int> build(GpuWork& work, const Ints& row_start, const Ints& context,
                                const Ints& scheduled, const std::optional<Ancestors>& ancestors,
                                int table_offset, int table_stride, int path_offset,
                                const Table& items, const List& num_items, const Table& rows,
                                const List& paths) {
  check_rows(row_start, context, scheduled, rows.shape(0));
  GpuWorkBatch batch{span_of(row_start), span_of(context), span_of(scheduled), {}, 0,
                     table_offset,       table_stride,     path_offset};
  if (ancestors) {
    require(ancestors->shape(0) == static_cast<size_t>(batch.row_start.back()),
            "ancestors must be [rows, words]");
    batch.ancestors = {ancestors->data(), ancestors->size()}, batch.words = ancestors->shape(1);
  }
  require(num_items.size() == 1, "there is one number of items");
  const GpuWorkArrays out{records_of<GpuWorkItem>(items, "items must have 10 numbers"),
                          records_of<GpuWorkRow>(rows, "rows must have 3 numbers"),
                          {paths.data(), paths.size()}};
  const GpuWorkSize size = work.build(batch, out);
  *num_items.data() = size.items;
  return {size.items, size.paths, size.partials};
}

}  // namespace

void bind_gpu(nb::module_& m) {
  nb::class_<GpuWork>(m, "GpuWork",
                      "Makes the work of attention in steps on a GPU, of layers that have this "
                      "shape of it in common.")
      .def(
          "__init__",
          [](GpuWork* self, int rows_per_tile, int units_per_item, int programs, int split,
             int window, int sink_tokens) {
            new (self) GpuWork(
                make_work(rows_per_tile, units_per_item, programs, split, window, sink_tokens));
          },
          nb::arg("rows_per_tile"), nb::arg("units_per_item"), nb::arg("programs"),
          nb::arg("split"), nb::arg("window") = 0, nb::arg("num_sink_tokens") = 0,
          "Query rows of a tile; KV heads, times the tiles that the query heads of each need; "
          "programs of the persistent kernel; keys of a "
          "split; what rows see. Raises ValueError.")
      .def_prop_ro("rows_per_tile", [](const GpuWork& work) { return work.shape.rows_per_tile; })
      .def_prop_ro("split", [](const GpuWork& work) { return work.shape.split; })
      .def_prop_ro("window", [](const GpuWork& work) { return work.shape.window; })
      .def_prop_ro("num_sink_tokens", [](const GpuWork& work) { return work.shape.sink_tokens; })
      .def("build", &build, nb::arg("row_start"), nb::arg("context_len"), nb::arg("scheduled_len"),
           nb::arg("ancestors").none(), nb::arg("table_offset"), nb::arg("table_stride"),
           nb::arg("path_offset"), nb::arg("items").noconvert(), nb::arg("num_items").noconvert(),
           nb::arg("rows").noconvert(), nb::arg("paths").noconvert(),
           "Writes the work of a batch, and returns the numbers of items, of entries of paths and "
           "of partial results. `build_work` of the "
           "backend says what it is. Raises ValueError where it does not fit.");
}

}  // namespace headrace

// Matrices whose scales lie in a table, for Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "plan.h"

namespace nb = nanobind;

namespace headrace {
namespace {

Format format_of(const std::string& codes) {
  for (const auto& [name, format] : {std::pair("2", Format::kTable2),
                                     {"3", Format::kTable3},
                                     {"4", Format::kTable4},
                                     {"8", Format::kTable8},
                                     {"lookup", Format::kLookup4},
                                     {"e4m3", Format::kFloat8E4},
                                     {"e5m2", Format::kFloat8E5},
                                     {"2:4 int4", Format::kSparse4},
                                     {"2:4 int8", Format::kSparse8},
                                     {"2:4 int8 by row", Format::kSparseI8},
                                     {"2:4 bf16", Format::kSparseBf16}})
    if (codes == name) return format;
  throw std::invalid_argument("no kernel reads codes like " + codes);
}

Number number_of(const std::optional<std::string>& type) {
  if (!type || *type == "none") return Number::kNone;
  for (const auto& [name, number] : {std::pair("u8", Number::kU8),
                                     {"f16", Number::kF16},
                                     {"bf16", Number::kBf16},
                                     {"f32", Number::kF32}})
    if (*type == name) return number;
  throw std::invalid_argument("unknown numbers of a table: " + *type);
}

TableSpec spec_of(const std::string& codes, int rows, int cols, int scale_columns,
                  const std::string& scales, const std::optional<std::string>& zeros,
                  const std::vector<float>& values) {
  TableSpec spec{format_of(codes), rows, cols, scale_columns, number_of(scales), number_of(zeros)};
  require(values.size() == (spec.format == Format::kLookup4 ? spec.values.size() : 0),
          "codes that are looked up have 16 values, others none");
  std::copy(values.begin(), values.end(), spec.values.begin());
  check_table(spec);
  return spec;
}

}  // namespace

void bind_weights(nb::module_& m) {
  nb::class_<TableSpec>(m, "TableSpec",
                        "A matrix whose scales lie in a table, 16 columns or a multiple of 32 to "
                        "each. Codes are integers of 2, 3, 4 or 8 bits,\n"
                        "the numbers of 16 values, floats of 8 bits, or 2:4 weights; numbers are "
                        "f16, bf16, f32, and u8 for zero points. A weight is scale *\n"
                        "(code - zero point), scale * code + zero where zeros are floats, or, "
                        "without zeros, scale * (code - middle).")
      .def(
          "__init__",
          [](TableSpec* self, const std::string& codes, int rows, int cols, int scale_columns,
             const std::string& scales, const std::optional<std::string>& zeros,
             const std::vector<float>& values) {
            new (self) TableSpec(spec_of(codes, rows, cols, scale_columns, scales, zeros, values));
          },
          nb::arg("codes"), nb::arg("rows"), nb::arg("cols"), nb::arg("scale_columns"),
          nb::arg("scales"), nb::arg("zeros").none(), nb::arg("values") = std::vector<float>())
      .def(
          "copy_bytes",
          [](const TableSpec& s, bool by_rows) { return copy_bytes(empty_table(s), by_rows); },
          nb::arg("by_rows"), "Bytes of a copy, of which kernels read rows or columns; 0: none.")
      .def_prop_ro("nbytes", [](const TableSpec& s) {
        const Weight w = empty_table(s);
        return w.stride * w.tiles();
      });
}

}  // namespace headrace

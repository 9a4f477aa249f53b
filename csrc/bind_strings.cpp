// Arrays of strings as GGUF files have them, each behind its length in 64 bits. Nothing
// in the file is trusted.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "bind.h"

namespace nb = nanobind;

namespace headrace {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Calls take(text, length) for each of `count` strings that begin at byte `offset`, and
// returns where the last one ends.
template <class F>
size_t walk(const Bytes& file, size_t offset, size_t count, F&& take) {
  const auto need = [&](uint64_t bytes) {
    if (offset > file.size() || bytes > file.size() - offset)
      throw std::out_of_range("a string runs past the end");
  };
  for (size_t i = 0; i < count; i++) {
    uint64_t length;
    need(sizeof length);
    std::memcpy(&length, file.data() + offset, sizeof length);
    offset += sizeof length;
    need(length);
    take(reinterpret_cast<const char*>(file.data() + offset), static_cast<size_t>(length));
    offset += length;
  }
  return offset;
}

// Python's text of these bytes. Throws UnicodeDecodeError.
nb::object text_of(const char* text, size_t length) {
  PyObject* made = PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(length), nullptr);
  if (!made) throw nb::python_error();
  return nb::steal(made);
}

size_t skip_strings(const Bytes& file, size_t offset, size_t count) {
  return walk(file, offset, count, [](const char*, size_t) {});
}

nb::tuple read_strings(const Bytes& file, size_t offset, size_t count) {
  nb::list strings;
  const size_t end = walk(file, offset, count, [&](const char* text, size_t length) {
    strings.append(text_of(text, length));
  });
  return nb::make_tuple(strings, end);
}

nb::list cut_at_space(const nb::list& strings) {
  nb::list pairs;
  for (const nb::handle string : strings) {
    Py_ssize_t size;
    const char* text = PyUnicode_AsUTF8AndSize(string.ptr(), &size);
    if (!text) throw nb::python_error();
    const auto length = static_cast<size_t>(size);
    const auto* space = static_cast<const char*>(std::memchr(text, ' ', length));
    const size_t left = space ? static_cast<size_t>(space - text) : length,
                 right = space ? left + 1 : length;
    pairs.append(nb::make_tuple(text_of(text, left), text_of(text + right, length - right)));
  }
  return pairs;
}

}  // namespace

void bind_strings(nb::module_& m) {
  m.def("skip_strings", &skip_strings, nb::arg("file"), nb::arg("offset"), nb::arg("count"),
        "Where so many strings end that begin at a byte. Raises IndexError where that is past the "
        "end of the file.");
  m.def("read_strings", &read_strings, nb::arg("file"), nb::arg("offset"), nb::arg("count"),
        nb::sig("def read_strings(file: object, offset: int, count: int) -> tuple[list[str], int]"),
        "The strings, and where they end. Raises IndexError as skip_strings does, and "
        "UnicodeDecodeError.");
  m.def("cut_at_space", &cut_at_space, nb::arg("strings"),
        nb::sig("def cut_at_space(strings: list[str]) -> list[tuple[str, str]]"),
        "Each string in two: what is before its first space, and what is behind it.");
}

}  // namespace headrace

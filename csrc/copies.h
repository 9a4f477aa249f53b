// The copies of a plan's matrices by columns and by rows (copy_shape.h), and of the tiles of a
// matrix that shares its memory with another. They are made when the matrices are packed.
#pragma once
#include <map>
#include <vector>

#include "copy_shape.h"
#include "pool.h"
#include "weights.h"

namespace headrace {

// Whether a matrix has copies.
inline bool has_copies(const Weight& weight) { return has_copies(weight.format) && !weight.wide; }

// Bytes of a copy, with panels for one thread if it is by columns; 0: no copies.
size_t copy_bytes(const Weight& weight, bool by_rows);

class MatrixCopies {
 public:
  // With the kernels of an instruction set by name.
  explicit MatrixCopies(const char* isa) : kernels_(&copy_kernels(isa)) {}
  const CopyKernels& kernels() const { return *kernels_; }

  // Bytes of a copy of a matrix.
  static size_t column_bytes(const Weight& weight, int threads);
  static size_t row_bytes(const Weight& weight);

  // Takes memory of that size for a copy of matrix `number`.
  void add_columns(int number, const Weight& weight, int threads, uint8_t* to);
  void add_rows(int number, const Weight& weight, uint8_t* to);
  // The tiles, of so many bytes, one after the other.
  void add_tiles(int number, const Weight& weight, size_t bytes, uint8_t* to);
  // Fills the copies that are new, on the pool, from the packed matrices.
  void fill(Pool& pool);

  // Null: there is no such copy.
  const ColumnCopy* columns(int number) const { return find(columns_, number); }
  const RowCopy* rows(int number) const { return find(rows_, number); }
  const Weight* tiles(int number) const { return find(tiles_, number); }

 private:
  enum class Kind { kColumns, kRows, kTiles };
  struct New {
    int number;
    Weight weight;
    Kind kind;
  };
  template <class T>
  static const T* find(const std::map<int, T>& copies, int number) {
    const auto at = copies.find(number);
    return at == copies.end() ? nullptr : &at->second;
  }

  const CopyKernels* kernels_;
  std::map<int, ColumnCopy> columns_;
  std::map<int, RowCopy> rows_;
  std::map<int, Weight> tiles_;
  std::vector<New> new_;
};

}  // namespace headrace

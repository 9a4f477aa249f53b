// The source of all kernels but the integer matrix kernels (kernels_integer.h), compiled once per
// instruction set: isa.cpp includes this file inside its own namespace. Nothing from the standard
// library is called here: an inline function of it compiled for AVX-512 might be the copy that the
// linker keeps for all units.
// clang-format off: each of these needs those before it.
#include "simd_unroll.h"
#include HR_SIMD
#include "kernels_functions.h"
#include "kernels_rows.h"
#include "kernels_pack.h"
#include "kernels_attention.h"
#include "kernels_key_bounds.h"
#include "kernels_kv.h"
#include "kernels_sparse.h"
#include "kernels_matmul.h"
#include "kernels_matmul_table.h"
#include "kernels_matmul_wide.h"
#include "kernels_matmuls.h"
#include "kernels_adapter.h"
#include "kernels_sample.h"
// clang-format on

Kernels* make_table(const char* name) {
  static Kernels k;
  k.name = name;
  k.max_rows = kMaxRows;
  k.max_queries = kMaxQueries;
  fill_float_matmuls(k);
  k.pack[static_cast<int>(Form::kQ8)] = pack_q8<false>;
  k.pack[static_cast<int>(Form::kQ8Offset)] = pack_q8<true>;
  k.pack[static_cast<int>(Form::kQ8Row)] = pack_q8_row<false>;
  k.pack[static_cast<int>(Form::kQ8Mixed)] = pack_q8_row<true>;
  k.pack[static_cast<int>(Form::kBf16)] = pack_bf16;
  k.pack[static_cast<int>(Form::kF32)] = pack_f32;
  k.norm[static_cast<int>(NormKind::kRms)] = norm<NormKind::kRms>;
  k.norm[static_cast<int>(NormKind::kLayer)] = norm<NormKind::kLayer>;
  fill_activations(k);
  k.add = add_rows;
  k.adapter_down = adapter_down;
  k.adapter_up = adapter_up;
  k.finish_tile = finish_tile;
  k.rotate_tile = rotate_tile;
  k.rotate_row = rotate_row;
  k.write_key_tile = write_key_tile;
  k.write_value_tile = write_value_tile;
  fill_attention<KvType::kBf16, KvBf16>(k);
  fill_attention<KvType::kF16, KvF16>(k);
  fill_attention<KvType::kF32, KvF32>(k);
  fill_attention<KvType::kInt8, KvQuantised<8>>(k);
  fill_attention<KvType::kInt4, KvQuantised<4>>(k);
  fill_attention<KvType::kK8V4, KvQuantised<8>, KvQuantised<4>>(k);
  k.bound_products = bound_products;
  k.add_highest_waves = add_highest_waves;
  k.rotate_head = rotate_head;
  k.quantise_kv = quantise_kv;
  k.round_keys = round_keys;
  k.values_of_keys = values_of_keys;
  k.merge = merge;
  k.scale = scale;
  k.soft_cap = soft_cap_row;
  k.combine = combine;
  k.peaks = peaks;
  k.top = top;
  k.count = count;
  k.collect = collect;
  k.weigh = weigh;
  k.share = share;
  k.noisiest = noisiest;
  k.philox = philox;
  k.dot_rate = dot_rate;
  return &k;
}

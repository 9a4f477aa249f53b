// The blocks are those of ggml (`block_iq4_nl` and so on in `ggml-common.h`); what they
// mean is in headrace/quant/gguf_blocks.py.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "weights_table.h"

namespace headrace {
namespace {

uint16_t half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  return half;
}

void read_iq4_nl(const uint8_t* b, uint8_t* codes,
                 uint16_t* scales) {  // d, codes[32]: low nibbles are the first half
  scales[0] = half_at(b);
  for (int i = 0; i < 16; i++) {
    codes[i] = b[2 + i] & 15;
    codes[i + 16] = b[2 + i] >> 4;
  }
}

// Codes 0 to 3 that stand for -1 to 2 become integers of 2 bits around 2, of the other
// sign, and so does their scale.
uint8_t around_two(int code) { return static_cast<uint8_t>(code ^ 3); }
uint16_t negative(uint16_t half) { return half ^ 0x8000; }

// The first digits to the base 3 of numbers that are fractions of 256, digit by digit.
uint8_t* read_digits(const uint8_t* b, int count, int digits, uint8_t* codes) {
  for (int n = 0, power = 1; n < digits; n++, power *= 3)
    for (int i = 0; i < count; i++) *codes++ = around_two((b[i] * power & 255) * 3 >> 8);
  return codes;
}

void read_tq1_0(const uint8_t* b, uint8_t* codes, uint16_t* scales) {  // codes[160], [80], [16], d
  codes = read_digits(b, 32, 5, codes);
  codes = read_digits(b + 32, 16, 5, codes);
  read_digits(b + 48, 4, 4, codes);
  scales[0] = negative(half_at(b + 52));
}

void read_tq2_0(const uint8_t* b, uint8_t* codes, uint16_t* scales) {  // codes[256], d
  for (int k = 0; k < 256; k++)
    codes[k] = around_two(b[k / 128 * 32 + k % 32] >> k % 128 / 32 * 2 & 3);
  scales[0] = negative(half_at(b + 64));
}

// e4m3 without its sign as f16: ggml has 0 for its NaN, and a number for the one with a
// sign.
uint16_t half_of_e4m3(uint8_t code) {
  constexpr uint16_t kSubnormal[] = {0, 0x1800, 0x1c00, 0x1e00, 0x2000, 0x2100, 0x2200, 0x2300};
  if (code == 127) return 0;
  return (code & 127) < 8 ? kSubnormal[code & 7]
                          : static_cast<uint16_t>(((code & 127) << 7) + (8 << 10));
}

void read_nvfp4(const uint8_t* b, uint8_t* codes,
                uint16_t* scales) {  // scales[4], codes[64] in halves of 16
  for (int j = 0; j < 4; j++) {
    scales[j] = half_of_e4m3(b[j]);
    for (int i = 0; i < 8; i++) {
      codes[16 * j + i] = b[4 + 8 * j + i] & 15;
      codes[16 * j + i + 8] = b[4 + 8 * j + i] >> 4;
    }
  }
}

constexpr TableBlocks kBlocks[] = {
    {"IQ4_NL", Format::kLookup4, 32, 18, 32, read_iq4_nl},
    {"TQ1_0", Format::kTable2, 256, 54, 256, read_tq1_0},
    {"TQ2_0", Format::kTable2, 256, 66, 256, read_tq2_0},
    {"NVFP4", Format::kLookup4, 64, 36, 16, read_nvfp4},
};

}  // namespace

const TableBlocks& table_blocks(const std::string& name) {
  const auto* found = std::find_if(std::begin(kBlocks), std::end(kBlocks),
                                   [&](const TableBlocks& b) { return name == b.name; });
  if (found == std::end(kBlocks))
    throw std::invalid_argument("no kernel reads a table from blocks of " + name);
  return *found;
}

}  // namespace headrace

// Quantizing with a scale a block, whatever the kind of scale.
//
// `Scaling` says what follows from an amax:
//   using Stored                                         what is kept of a scale
//   void operator()(amax, n, scale, stored) const        the multipliers and what is kept
// `Scales` takes what is kept: put(i, j, rows, cols, stored, step) for blocks of (M, K).
#pragma once

#include "tiles.h"

namespace ixt {

template <typename Scaling, typename Scales>
class BlockQuantizer {
 public:
  using Stored = typename Scaling::Stored;

  BlockQuantizer(Matrix x, Fp8 out, Block block, Scaling scaling, Scales scales, CodesTo codes)
      : x_(x),
        loops_(loops_of(block_loop_table(), x.dtype())),
        format_(static_cast<int>(out)),
        block_(block),
        scaling_(scaling),
        scales_(scales),
        codes_(codes) {}

  // Over the whole matrix.
  void run() const {
    if (block_.m == 1 && !codes_.transposed) {
      for_flat_tiles(codes_.rows, codes_.cols, *this);
    } else {
      for_tall_tiles(codes_.rows, codes_.cols, *this);
    }
  }

  // Over an area that begins at a block's corner and ends at one or with the matrix.
  void operator()(const Area& area) const {
    write_codes(codes_, area, [&](uint8_t* q, int64_t stride) {
      block_.m == 1 ? rows(area, q, stride) : columns(area, q, stride);
    });
  }

 private:
  // Blocks of 1 x G.
  void rows(const Area& area, uint8_t* q, int64_t stride) const {
    const Tile x = x_.tile(area);
    float amax[kTileGroups];
    float scale[kTileGroups];
    Stored stored[kTileGroups];
    const int64_t groups = ceil_div(x.cols, block_.k);
    loops_.amax_groups(x, block_.k, amax, groups);
    scaling_(amax, x.rows * groups, scale, stored);
    scales_.put(area.m, area.k / block_.k, x.rows, groups, stored, groups);
    loops_.quantize_groups[format_](x, block_.k, scale, groups, q, stride);
  }

  // Blocks of G x 1 and G x G.
  void columns(const Area& area, uint8_t* q, int64_t stride) const {
    for (int64_t r = 0; r < area.rows; r += block_.m) {
      const int64_t rows = std::min(block_.m, area.rows - r);
      const Tile band = x_.tile({area.m + r, area.k, rows, area.cols});
      float scale[kTileCols];
      band_scales(band, (area.m + r) / block_.m, area.k / block_.k, scale);
      loops_.quantize_columns[format_](band, scale, q + r * stride, stride);
    }
  }

  // The multiplier of each column of one row of blocks, and stores its scales.
  void band_scales(const Tile& band, int64_t i, int64_t j, float* scale) const {
    float amax[kTileCols];
    Stored stored[kTileCols];
    loops_.amax_columns(band, amax);
    if (block_.k == 1) {
      scaling_(amax, band.cols, scale, stored);
      scales_.put(i, j, 1, band.cols, stored, band.cols);
      return;
    }
    const int64_t blocks = ceil_div(band.cols, block_.k);
    float block_scale[kTileCols];
    for (int64_t b = 0; b < blocks; ++b) {  // in place: a block's columns are never before b
      const int64_t last = std::min(band.cols, (b + 1) * block_.k);
      amax[b] = *std::max_element(amax + b * block_.k, amax + last);
    }
    scaling_(amax, blocks, block_scale, stored);
    scales_.put(i, j, 1, blocks, stored, blocks);
    for (int64_t c = 0; c < band.cols; ++c) scale[c] = block_scale[c / block_.k];
  }

  Matrix x_;
  const BlockLoops& loops_;
  int format_;
  Block block_;
  Scaling scaling_;
  Scales scales_;
  CodesTo codes_;
};

}  // namespace ixt

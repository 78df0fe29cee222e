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
    Stored stored[kTileBands * kTileCols];  // a row for each band, a row of blocks
    const int64_t bands = ceil_div(area.rows, block_.m);
    for (int64_t b = 0; b < bands; ++b) {
      const int64_t r = b * block_.m;
      const int64_t rows = std::min(block_.m, area.rows - r);
      const Tile band = x_.tile({area.m + r, area.k, rows, area.cols});
      float scale[kTileCols];
      band_scales(band, scale, stored + b * kTileCols);
      loops_.quantize_columns[format_](band, scale, q + r * stride, stride);
    }
    scales_.put(area.m / block_.m, area.k / block_.k, bands, ceil_div(area.cols, block_.k), stored,
                kTileCols);
  }

  // The multiplier of each column of a band, and what is kept of the scales of its blocks.
  void band_scales(const Tile& band, float* scale, Stored* stored) const {
    float amax[kTileCols];
    loops_.amax_columns(band, amax);
    if (block_.k == 1) return scaling_(amax, band.cols, scale, stored);
    const int64_t blocks = ceil_div(band.cols, block_.k);
    float block_scale[kTileCols];
    for (int64_t b = 0; b < blocks; ++b) {  // in place: a block's columns are never before b
      const int64_t last = std::min(band.cols, (b + 1) * block_.k);
      amax[b] = *std::max_element(amax + b * block_.k, amax + last);
    }
    scaling_(amax, blocks, block_scale, stored);
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

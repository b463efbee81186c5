// Index scores of a long prefill on Hopper: score[r, e] = sum over heads of weight[r, h] * ReLU(q[r, h] . k[e]).
//
// A block serves eight consecutive query rows of one request: each of two warpgroups multiplies tiles of 64 keys by the
// 64 heads of four rows, in two halves. Keys and queries arrive through the copy engine, in the tensor cores' swizzled
// layout; a third warpgroup feeds a ring of key tiles that both read. A warpgroup reduces its first half to scores while
// its second is being multiplied, and its second while the other warpgroup multiplies: the two take turns at the tensor
// cores, so that the reduction costs no time of its own.
//
// Blocks are persistent. Every one takes an equal share of all key tiles of all rows, found by a prefix sum over lengths.

#include "hopper.cuh"

namespace {

using namespace hopper;

constexpr int kRows = 4;      // query rows of a warpgroup
constexpr int kHalfRows = 2;  // query rows of one product
constexpr int kBlockRows = kRows * kGroups;
constexpr int kStages = 5;    // key tiles in flight
constexpr int kQueryAtomBytes = kRows * kHeads * kAtomBytes;
constexpr int kQueryBytes = kQueryAtomBytes * kAtoms;
constexpr int kHalfBytes = kHalfRows * kHeads * kAtomBytes;
constexpr int kProducts = kHalfRows * kHeads * kKeys / kWarpgroup;  // accumulators of a thread and half
constexpr int kHalfWeights = kHalfRows * kRuns * 2;

struct Shared {
  alignas(1024) unsigned char query[kGroups][kQueryBytes];
  alignas(1024) unsigned char keys[kStages][kKeyBytes];
  Ends ends;
  alignas(8) uint64 full[kStages];
  uint64 empty[kStages];
  uint64 query_full[kGroups];
  uint64 query_empty[kGroups];
  uint64 turn[kGroups];
};
static_assert(sizeof(Shared) + 1024 <= 231424, "SHARED_BYTES of hopper.py");

// Feeds queries and key tiles to the warpgroups that multiply; one thread.
__device__ __forceinline__ void produce(Shared& shared, Share share, const TensorMap* query_map, const Keys& keys) {
  const uint64 policy = read_again();
  Unit unit;
  int tile = 0;
  for (int number = 0; next_unit(share, shared.ends, unit); ++number) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      wait(&shared.query_empty[group], (number & 1) ^ 1);
      expect(&shared.query_full[group], kQueryBytes);
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom) {
        copy_tile(
            shared.query[group] + atom * kQueryAtomBytes, query_map, &shared.query_full[group], atom * kAtom,
            (unit.group * kBlockRows + group * kRows) * kHeads, 0, read_once());
      }
    }
    const int64 base = keys.base(int64(unit.group) * kBlockRows);
    for (int block = unit.first; block < unit.stop; ++block, ++tile) {
      const int stage = tile % kStages;
      const int page = keys.paged() ? static_cast<int>(keys.table[base + block]) : 0;
      wait(&shared.empty[stage], ((tile / kStages) & 1) ^ 1);
      copy_keys(shared.keys[stage], keys, &shared.full[stage], block, page, policy);
    }
  }
}

// Multiplies and reduces: one warpgroup, rows group * 8 + number * 4 to + 3.
__device__ __forceinline__ void consume(
    Shared& shared, Share share, int number, const float* __restrict__ weight, const Index& lengths, float* out,
    int64 out_stride, int rows, int width) {
  const int lane = threadIdx.x % kWarp, own_key = key_of_thread();
  const bool leader = threadIdx.x % kWarpgroup == 0;
  const uint32 query = address(shared.query[number]);
  float first[kProducts], second[kProducts], held[kRows * kRuns * 2];
  Unit unit;
  int tile = 0;
  for (int count = 0; next_unit(share, shared.ends, unit); ++count) {
    const int base_row = unit.group * kBlockRows + number * kRows;
    load_weights<kRows>(held, weight, base_row, rows);
    Target target[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = base_row + half * kHalfRows + (lane & 1);
      target[half].scores = out + int64(row) * out_stride;
      target[half].length = row < rows ? clamped(lengths[row], width) : 0;
    }
    wait(&shared.query_full[number], count & 1);
    int key = unit.first * kKeys + own_key;
    for (int block = unit.first; block < unit.stop; ++block, key += kKeys, ++tile) {
      const int stage = tile % kStages;
      const uint32 keys = address(shared.keys[stage]);
      wait(&shared.full[stage], (tile / kStages) & 1);
      wait(&shared.turn[number], (tile & 1) ^ (number == 0));
      begin_product(first);
      multiply_atom(first, keys, query, 0, kQueryAtomBytes);
      multiply_atom(first, keys, query, 1, kQueryAtomBytes);
      end_product();
      begin_product(second);
      multiply_atom(second, keys, query + kHalfBytes, 0, kQueryAtomBytes);
      if (leader) arrive(&shared.turn[number ^ 1]);
      multiply_atom(second, keys, query + kHalfBytes, 1, kQueryAtomBytes);
      end_product();
      finish<1>(first);
      write_two_rows(first, held, target[0], key);
      finish<0>(second);
      if (lane == 0) arrive(&shared.empty[stage]);
      write_two_rows(second, held + kHalfWeights, target[1], key);
    }
    if (lane == 0) arrive(&shared.query_empty[number]);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1) prefill_scores(
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
    const float* __restrict__ weight, const Index lengths, const Index table, int64 table_stride, const Index request,
    int64 next_n, float* __restrict__ out, int64 out_stride, int rows, int groups, int width, float fill, int filled) {
  extern __shared__ unsigned char raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw + (1024 - (address(raw) & 1023)) % 1024);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      init(&shared.full[stage], 1);
      init(&shared.empty[stage], kGroups * kWarps);
    }
    for (int group = 0; group < kGroups; ++group) {
      init(&shared.query_full[group], 1);
      init(&shared.query_empty[group], kWarps);
      init(&shared.turn[group], 1);
    }
    publish_barriers();
  }
  const Share share = scan_lengths<kBlockRows>(shared.ends, lengths, rows, groups, width);
  const int role = role_of_thread();
  if (role == kGroups) {
    give_registers<kFeedRegisters>();
    const int warp = threadIdx.x % kWarpgroup / kWarp;
    if (warp == 0) {
      if (threadIdx.x % kWarp == 0) {
        produce(shared, share, &query_map, Keys{&key_map, table, table_stride, request, next_n});
      }
    } else if (filled) {
      fill_rows(lengths, out, out_stride, rows, width, fill, warp - 1, kWarps - 1);
    }
  } else {
    take_registers<kMultiplyRegisters>();
    consume(shared, share, role, weight, lengths, out, out_stride, rows, width);
  }
}

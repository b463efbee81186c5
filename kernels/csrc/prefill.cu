// Index scores of a long prefill on Hopper: score[r, e] = sum over heads of weight[r, h] * ReLU(q[r, h] . k[e]).
//
// A block serves eight consecutive query rows of one request. Keys and queries arrive through the copy engine, in the
// tensor cores' swizzled layout, and every warpgroup multiplies each tile of 64 keys by the heads of its own rows. The
// warpgroups take turns at the tensor cores, so that some reduce their products to scores while another multiplies, and
// the reduction costs no time of its own. Two ways to share the rows:
//
//   prefill_two    two warpgroups of four rows. Each multiplies in two halves and reduces the first while the tensor cores
//                  are at its second. A third warpgroup feeds them.
//   prefill_four   four warpgroups of two rows, fed by a fifth.
//
// Blocks are persistent. Every one takes an equal share of all key tiles of all rows, found by a prefix sum over lengths.

#include "hopper.cuh"

namespace {

using namespace hopper;

constexpr int kBlockRows = 8;
constexpr int kProductRows = 2;  // query rows of one product
constexpr int kStages = 5;       // key tiles in flight
constexpr int kProducts = kProductRows * kHeads * kKeys / kWarpgroup;  // accumulators of a thread and product
constexpr int kProductWeights = kProductRows * kRuns * 2;

template <int kGroups>
struct Layout {
  static constexpr int kRows = kBlockRows / kGroups;  // query rows of a warpgroup
  static constexpr int kThreads = (kGroups + 1) * kWarpgroup;
  // Registers of a thread at launch are 168 and 96; what the feeding warpgroup gives up, the others take.
  static constexpr int kFeedRegisters = kGroups == 2 ? 40 : 24;
  static constexpr int kMultiplyRegisters = kGroups == 2 ? 232 : 112;
  static constexpr int kQueryAtomBytes = kRows * kHeads * kAtomBytes;
  static constexpr int kQueryBytes = kQueryAtomBytes * kAtoms;

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
};

// Feeds queries and key tiles to the warpgroups that multiply; one thread.
template <int kGroups>
__device__ __forceinline__ void produce(
    typename Layout<kGroups>::Shared& shared, Share share, const TensorMap* query_map, const Keys& keys) {
  using L = Layout<kGroups>;
  const uint64 policy = read_again();
  Unit unit;
  int tile = 0;
  for (int number = 0; next_unit(share, shared.ends, unit); ++number) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      wait(&shared.query_empty[group], (number & 1) ^ 1);
      expect(&shared.query_full[group], L::kQueryBytes);
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom) {
        copy_tile(
            shared.query[group] + atom * L::kQueryAtomBytes, query_map, &shared.query_full[group], atom * kAtom,
            (unit.group * kBlockRows + group * L::kRows) * kHeads, 0, read_once());
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

// Starts the product of a tile by two rows. Half of it under way, `leader` hands the turn on where `next` is given.
__device__ __forceinline__ void multiply(
    float (&d)[kProducts], uint32 keys, uint32 query, int query_atom_bytes, uint64* next, bool leader) {
  begin_product(d);
  multiply_atom(d, keys, query, 0, query_atom_bytes);
  if (next != nullptr && leader) arrive(next);
  multiply_atom(d, keys, query, 1, query_atom_bytes);
  end_product();
}

// Multiplies and reduces: one warpgroup, its rows of every group of eight.
template <int kGroups>
__device__ __forceinline__ void consume(
    typename Layout<kGroups>::Shared& shared, Share share, int number, const float* __restrict__ weight,
    const Index& lengths, float* out, int64 out_stride, int rows, int width) {
  using L = Layout<kGroups>;
  constexpr int kHalves = L::kRows / kProductRows;
  constexpr int kHalfBytes = kProductRows * kHeads * kAtomBytes;
  const int lane = threadIdx.x % kWarp, own_key = key_of_thread();
  const bool leader = threadIdx.x % kWarpgroup == 0;
  const uint32 query = address(shared.query[number]);
  uint64* const next = &shared.turn[(number + 1) % kGroups];
  float first[kProducts], second[kProducts], held[L::kRows * kRuns * 2];
  Unit unit;
  int tile = 0;
  for (int count = 0; next_unit(share, shared.ends, unit); ++count) {
    const int base_row = unit.group * kBlockRows + number * L::kRows;
    load_weights<L::kRows>(held, weight, base_row, rows);
    Target target[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = base_row + half * kProductRows + (lane & 1);
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
      multiply(first, keys, query, L::kQueryAtomBytes, kHalves == 1 ? next : nullptr, leader);
      if constexpr (kHalves == 2) {
        multiply(second, keys, query + kHalfBytes, L::kQueryAtomBytes, next, leader);
        finish<1>(first);
        write_two_rows(first, held, target[0], key);
        finish<0>(second);
        if (lane == 0) arrive(&shared.empty[stage]);
        write_two_rows(second, held + kProductWeights, target[kHalves - 1], key);
      } else {
        finish<0>(first);
        if (lane == 0) arrive(&shared.empty[stage]);
        write_two_rows(first, held, target[0], key);
      }
    }
    if (lane == 0) arrive(&shared.query_empty[number]);
  }
}

template <int kGroups>
__device__ __forceinline__ void prefill(
    const TensorMap& query_map, const TensorMap& key_map, const float* __restrict__ weight, const Index& lengths,
    const Index& table, int64 table_stride, const Index& request, int64 next_n, float* __restrict__ out,
    int64 out_stride, int rows, int groups, int width, float fill, int filled) {
  using L = Layout<kGroups>;
  extern __shared__ unsigned char raw[];
  auto& shared = *reinterpret_cast<typename L::Shared*>(raw + (1024 - (address(raw) & 1023)) % 1024);
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
  const Share share = scan_lengths<kBlockRows, L::kThreads>(shared.ends, lengths, rows, groups, width);
  const int role = role_of_thread();
  if (role == kGroups) {
    give_registers<L::kFeedRegisters>();
    const int warp = threadIdx.x % kWarpgroup / kWarp;
    if (warp == 0) {
      if (threadIdx.x % kWarp == 0) {
        produce<kGroups>(shared, share, &query_map, Keys{&key_map, table, table_stride, request, next_n});
      }
    } else if (filled) {
      fill_rows(lengths, out, out_stride, rows, width, fill, warp - 1, kWarps - 1);
    }
  } else {
    take_registers<L::kMultiplyRegisters>();
    consume<kGroups>(shared, share, role, weight, lengths, out, out_stride, rows, width);
  }
}

}  // namespace

#define PREFILL_ARGUMENTS                                                                                             \
  const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,                              \
      const float *__restrict__ weight, const Index lengths, const Index table, int64 table_stride,                    \
      const Index request, int64 next_n, float *__restrict__ out, int64 out_stride, int rows, int groups, int width,   \
      float fill, int filled

#define PREFILL_VALUES                                                                                                \
  query_map, key_map, weight, lengths, table, table_stride, request, next_n, out, out_stride, rows, groups, width,     \
      fill, filled

extern "C" __global__ void __launch_bounds__(Layout<2>::kThreads, 1) prefill_two(PREFILL_ARGUMENTS) {
  prefill<2>(PREFILL_VALUES);
}

extern "C" __global__ void __launch_bounds__(Layout<4>::kThreads, 1) prefill_four(PREFILL_ARGUMENTS) {
  prefill<4>(PREFILL_VALUES);
}

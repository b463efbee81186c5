// Index scores of a decode step on Hopper: one or two query rows a request, each over all keys of its request.
//
// A block takes an equal share of the key tiles of all requests, found by a prefix sum over lengths. One warp fetches page
// ids 32 at a time and feeds a deep ring of pages through the copy engine, eight lanes a page; the other warpgroups multiply
// and reduce a page each in turn. Keys are read once and are the first to leave the L2 cache, so they push nothing else out.

#include "hopper.cuh"

namespace {

using namespace hopper;

constexpr int kQueryBuffers = 2;
constexpr int kBox = 16;         // keys of one copy, `key_box` of hopper.py
constexpr int kParts = kKeys / kBox * kAtoms;
constexpr int kMemory = 212992;  // bytes for queries and key tiles

template <int kRows>
struct Layout {
  static constexpr int kGroups = kRows == 1 ? 4 : 3;  // warpgroups that multiply, as registers allow; one more feeds them
  static constexpr int kThreads = kWarpgroup * (kGroups + 1);  // `threads` of hopper.py
  static constexpr int kQueryAtomBytes = kRows * kHeads * kAtomBytes;
  static constexpr int kQueryBytes = kQueryAtomBytes * kAtoms;
  // A multiple of kGroups, so that a stage always belongs to the same warpgroup, which then sees each of its phases: copies
  // may arrive out of order, and a phase that a warpgroup skipped could be taken for the one that it waits for.
  static constexpr int kStages = (kMemory - kQueryBuffers * kQueryBytes) / kKeyBytes / kGroups * kGroups;

  struct Shared {
    alignas(1024) unsigned char query[kQueryBuffers][kQueryBytes];
    alignas(1024) unsigned char keys[kStages][kKeyBytes];
    Ends ends;
    alignas(8) uint64 full[kStages];
    uint64 empty[kStages];
    uint64 query_full[kQueryBuffers];
    uint64 query_empty[kQueryBuffers];
  };
  static_assert(sizeof(Shared) + 1024 <= 231424, "SHARED_BYTES of hopper.py");
};

// Feeds queries and pages; one warp. Lane l reads the id of every 32nd page, one batch ahead of the copies.
template <int kRows>
__device__ __forceinline__ void produce(
    typename Layout<kRows>::Shared& shared, Share share, const TensorMap* query_map, const Keys& keys) {
  using L = Layout<kRows>;
  const int lane = threadIdx.x % kWarp;
  const uint64 policy = read_once();
  Unit unit;
  int tile = 0;
  for (int number = 0; next_unit(share, shared.ends, unit); ++number) {
    const int buffer = number % kQueryBuffers;
    const int64 row = int64(unit.group) * kRows, base = keys.base(row);
    const bool paged = keys.paged();
    int64 page = paged && unit.first + lane < unit.stop ? keys.table[base + unit.first + lane] : 0;
    if (lane == 0) {
      wait(&shared.query_empty[buffer], ((number / kQueryBuffers) & 1) ^ 1);
      expect(&shared.query_full[buffer], L::kQueryBytes);
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom) {
        copy_tile(
            shared.query[buffer] + atom * L::kQueryAtomBytes, query_map, &shared.query_full[buffer], atom * kAtom,
            static_cast<int>(row) * kHeads, 0, policy);
      }
    }
    for (int batch = unit.first; batch < unit.stop; batch += kWarp) {
      const int ahead = batch + kWarp + lane;
      const int64 next = paged && ahead < unit.stop ? keys.table[base + ahead] : 0;
      const int count = min(kWarp, unit.stop - batch);
      for (int i = 0; i < count; ++i, ++tile) {
        const int own = static_cast<int>(__shfl_sync(0xffffffffu, page, i));
        const int stage = tile % L::kStages;
        if (lane == 0) {
          wait(&shared.empty[stage], ((tile / L::kStages) & 1) ^ 1);
          expect(&shared.full[stage], kKeyBytes);
        }
        __syncwarp();
        if (lane < kParts) {
          const int atom = lane % kAtoms, key = lane / kAtoms * kBox;
          copy_tile(
              shared.keys[stage] + atom * kKeyAtomBytes + key * kAtomBytes, keys.map, &shared.full[stage], atom * kAtom,
              key + (paged ? 0 : (batch + i) * kKeys), own, policy);
        }
      }
      page = next;
    }
  }
}

// Reduces the product of 64 keys by one row: even lanes write key l / 4 + 4 (l & 2) of their warp's sixteen.
__device__ __forceinline__ void write_row(const float (&d)[32], const float* weight, const Target& target, int key) {
  float sum[2];
  sum_heads(d, weight, sum);
  const bool second_key = threadIdx.x & 2;
  float score = (second_key ? sum[1] : sum[0]) + __shfl_xor_sync(0xffffffffu, second_key ? sum[0] : sum[1], 2);
  score += __shfl_xor_sync(0xffffffffu, score, 1);
  if ((threadIdx.x & 1) == 0 && key < target.length) target.scores[key] = score;
}

// Multiplies and reduces: the warpgroup takes every kGroups-th tile of the block's share.
template <int kRows>
__device__ __forceinline__ void consume(
    typename Layout<kRows>::Shared& shared, Share share, int number, const float* __restrict__ weight,
    const Index& lengths, float* out, int64 out_stride, int rows, int width) {
  using L = Layout<kRows>;
  const int lane = threadIdx.x % kWarp, own_key = key_of_thread();
  float products[kRows * kHeads * kKeys / kWarpgroup], held[kRows * kRuns * 2];
  Unit unit;
  int tile = 0;
  for (int count = 0; next_unit(share, shared.ends, unit); ++count) {
    const int buffer = count % kQueryBuffers, base_row = unit.group * kRows;
    load_weights<kRows>(held, weight, base_row, rows);
    const int row = base_row + (kRows == 2 ? lane & 1 : 0);
    const Target target = {out + int64(row) * out_stride, row < rows ? clamped(lengths[row], width) : 0};
    const uint32 query = address(shared.query[buffer]);
    wait(&shared.query_full[buffer], (count / kQueryBuffers) & 1);
    for (int block = unit.first; block < unit.stop; ++block, ++tile) {
      if (tile % L::kGroups != number) continue;
      const int stage = tile % L::kStages;
      const uint32 keys = address(shared.keys[stage]);
      wait(&shared.full[stage], (tile / L::kStages) & 1);
      begin_product(products);
      multiply_atom(products, keys, query, 0, L::kQueryAtomBytes);
      multiply_atom(products, keys, query, 1, L::kQueryAtomBytes);
      end_product();
      finish<0>(products);
      if (lane == 0) arrive(&shared.empty[stage]);
      if constexpr (kRows == 2) {
        write_two_rows(products, held, target, block * kKeys + own_key);
      } else {
        write_row(products, held, target, block * kKeys + own_key);
      }
    }
    if (lane == 0) arrive(&shared.query_empty[buffer]);
  }
}

template <int kRows>
__device__ __forceinline__ void decode(
    const TensorMap& query_map, const TensorMap& key_map, const float* __restrict__ weight, const Index& lengths,
    const Index& table, int64 table_stride, const Index& request, int64 next_n, float* __restrict__ out,
    int64 out_stride, int rows, int groups, int width, float fill, int filled) {
  using L = Layout<kRows>;
  extern __shared__ unsigned char raw[];
  auto& shared = *reinterpret_cast<typename L::Shared*>(raw + (1024 - (address(raw) & 1023)) % 1024);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < L::kStages; ++stage) {
      init(&shared.full[stage], 1);
      init(&shared.empty[stage], kWarps);
    }
    for (int buffer = 0; buffer < kQueryBuffers; ++buffer) {
      init(&shared.query_full[buffer], 1);
      init(&shared.query_empty[buffer], L::kGroups * kWarps);
    }
    publish_barriers();
  }
  const Share share = scan_lengths<kRows, L::kThreads>(shared.ends, lengths, rows, groups, width);
  const int role = role_of_thread();
  if (role == L::kGroups) {
    const int warp = threadIdx.x % kWarpgroup / kWarp;
    if (warp == 0) {
      produce<kRows>(shared, share, &query_map, Keys{&key_map, table, table_stride, request, next_n});
    } else if (filled) {
      fill_rows(lengths, out, out_stride, rows, width, fill, warp - 1, kWarps - 1);
    }
  } else {
    consume<kRows>(shared, share, role, weight, lengths, out, out_stride, rows, width);
  }
}

}  // namespace

#define DECODE_ARGUMENTS                                                                                              \
  const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,                              \
      const float *__restrict__ weight, const Index lengths, const Index table, int64 table_stride,                    \
      const Index request, int64 next_n, float *__restrict__ out, int64 out_stride, int rows, int groups, int width,   \
      float fill, int filled

#define DECODE_VALUES                                                                                                 \
  query_map, key_map, weight, lengths, table, table_stride, request, next_n, out, out_stride, rows, groups, width,     \
      fill, filled

extern "C" __global__ void __launch_bounds__(Layout<1>::kThreads, 1) decode_one(DECODE_ARGUMENTS) { decode<1>(DECODE_VALUES); }

extern "C" __global__ void __launch_bounds__(Layout<2>::kThreads, 1) decode_two(DECODE_ARGUMENTS) { decode<2>(DECODE_VALUES); }

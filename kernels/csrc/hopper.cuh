// What the Hopper kernels share: barriers, the copy engine, warpgroup products, and equal shares of ragged work.
//
// Needs sm_90a (wgmma, setmaxnreg, bulk tensor copies); other GPUs run the Triton kernel.

#pragma once

using int64 = long long;
using uint64 = unsigned long long;
using uint32 = unsigned int;

namespace hopper {

constexpr int kDim = 128;
constexpr int kHeads = 64;
constexpr int kKeys = 64;           // keys of a tile: a page
constexpr int kMostGroups = 4096;   // groups of rows whose lengths a block can scan
constexpr int kWarpgroup = 128;
constexpr int kMostWarps = 32;
constexpr int kWarp = 32;
constexpr int kWarps = kWarpgroup / kWarp;

constexpr int kAtom = 64;           // bf16 elements of a swizzled row: 128 bytes
constexpr int kAtomBytes = 128;
constexpr int kAtoms = kDim / kAtom;
constexpr int kKeyAtomBytes = kKeys * kAtomBytes;
constexpr int kKeyBytes = kKeyAtomBytes * kAtoms;
constexpr int kDepth = 16;          // elements of dim that one wgmma sums
constexpr int kStepsPerAtom = kAtom / kDepth;
constexpr int kStepBytes = kDepth * 2;
constexpr int kRuns = kHeads / 8;   // runs of eight columns that belong to a row

struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// Integers of 4 or 8 bytes.
struct Index {
  const void* data;
  int64 wide;
  __device__ __forceinline__ int64 operator[](int64 at) const {
    return wide ? static_cast<const int64*>(data)[at] : static_cast<const int*>(data)[at];
  }
};

__device__ __forceinline__ uint32 address(const void* shared) {
  return static_cast<uint32>(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ void init(uint64* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(uint64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

__device__ __forceinline__ void expect(uint64* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait(uint64* barrier, uint32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(address(barrier)),
      "r"(parity)
      : "memory");
}

// Policy of keys: read once, so the first to leave the L2 cache.
__device__ __forceinline__ uint64 read_once() {
  uint64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Policy of what is read again soon.
__device__ __forceinline__ uint64 read_again() {
  uint64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy_tile(
    void* target, const TensorMap* map, uint64* barrier, int dim, int row, int page, uint64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(address(target)),
      "l"(map), "r"(address(barrier)), "r"(dim), "r"(row), "r"(page), "l"(policy)
      : "memory");
}

// Matrix descriptor of a K-major operand in rows of 128 swizzled bytes: eight rows lie 1,024 bytes apart.
__device__ __forceinline__ uint64 descriptor(uint32 at) {
  constexpr uint64 kSwizzle128 = uint64(1) << 62, kEightRows = uint64(1024 >> 4) << 32, kUnused = uint64(1) << 16;
  return kSwizzle128 | kEightRows | kUnused | uint64((at & 0x3ffff) >> 4);
}

template <int kCount>
__device__ __forceinline__ void fence_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define R8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define R32(d, i) R8(d, i), R8(d, i + 8), R8(d, i + 16), R8(d, i + 24)

// d[64 keys, 64 columns] (+)= keys[64, 16] x query[64, 16]^T.
__device__ __forceinline__ void multiply_step(float (&d)[32], uint64 keys, uint64 query, int add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, add, 1, 1, 0, 0;\n"
      "}\n"
      : R32(d, 0)
      : "l"(keys), "l"(query), "r"(add));
}

// d[64 keys, 128 columns] (+)= keys[64, 16] x query[128, 16]^T.
__device__ __forceinline__ void multiply_step(float (&d)[64], uint64 keys, uint64 query, int add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, add, 1, 1, 0, 0;\n"
      "}\n"
      : R32(d, 0), R32(d, 32)
      : "l"(keys), "l"(query), "r"(add));
}

// Starts the part of a product that sums the dims of one atom: keys and query are shared addresses of the first atom,
// query_atom_bytes lie between two atoms of the query.
template <int kCount>
__device__ __forceinline__ void multiply_atom(
    float (&d)[kCount], uint32 keys, uint32 query, int atom, int query_atom_bytes) {
#pragma unroll
  for (int step = 0; step < kStepsPerAtom; ++step) {
    multiply_step(
        d, descriptor(keys + atom * kKeyAtomBytes + step * kStepBytes),
        descriptor(query + atom * query_atom_bytes + step * kStepBytes), atom + step);
  }
}

template <int kCount>
__device__ __forceinline__ void begin_product(float (&d)[kCount]) {
  fence_registers(d);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void end_product() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending products are under way.
template <int kPending, int kCount>
__device__ __forceinline__ void finish(float (&d)[kCount]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  fence_registers(d);
}

// ReLU that carries a NaN into the score, where a plain maximum would make it 0.
__device__ __forceinline__ float relu(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// Sums one row of a product over its heads: sum[r] for keys l / 4 and l / 4 + 8 of the warp's sixteen, and the columns
// 8 j + 2 (l % 4) + {0, 1} that this thread holds. d: the row's first accumulator, weight: its first head weight. The
// order is that of the Triton kernel as Triton 3.6 compiles it, so that a score has the same bits whichever kernel made it.
__device__ __forceinline__ void sum_heads(const float* d, const float* weight, float (&sum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) sum[r] = fmaf(relu(d[r * 2]), weight[0], __fmul_rn(relu(d[r * 2 + 1]), weight[1]));
#pragma unroll
  for (int j = 1; j < kRuns; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int r = 0; r < 2; ++r) sum[r] = fmaf(relu(d[j * 4 + r * 2 + c]), weight[j * 2 + c], sum[r]);
    }
  }
}

// One row as its thread writes it: where, and how many keys it sees.
struct Target {
  float* scores;
  int length;
};

// Reduces the product of 64 keys by two rows to scores and writes them. After two exchanges, with lanes l ^ 2 and l ^ 1,
// lane l holds the score of row l & 1 and key l / 4 + 4 (l & 2) of its warp's sixteen, which is entry `key`.
__device__ __forceinline__ void write_two_rows(
    const float (&d)[64], const float* weight, const Target& target, int key) {
  float sum[2][2];
  sum_heads(d, weight, sum[0]);
  sum_heads(d + kRuns * 4, weight + kRuns * 2, sum[1]);
  const bool second_row = threadIdx.x & 1, second_key = threadIdx.x & 2;
  float kept[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    kept[row] = (second_key ? sum[row][1] : sum[row][0]) +
                __shfl_xor_sync(0xffffffffu, second_key ? sum[row][0] : sum[row][1], 2);
  }
  const float score = (second_row ? kept[1] : kept[0]) +
                      __shfl_xor_sync(0xffffffffu, second_row ? kept[0] : kept[1], 1);
  if (key < target.length) target.scores[key] = score;
}

// The entry of `write_two_rows` within its tile.
__device__ __forceinline__ int key_of_thread() {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kWarpgroup / kWarp;
  return warp * 16 + lane / 4 + (lane & 2) * 4;
}

// Head weights that a thread needs for `kRows` rows from `row` on: columns 8 j + 2 (l % 4) + {0, 1}; 0 past `rows`.
template <int kRows>
__device__ __forceinline__ void load_weights(
    float (&held)[kRows * kRuns * 2], const float* __restrict__ weight, int row, int rows) {
#pragma unroll
  for (int j = 0; j < kRows * kRuns; ++j) {
    const int own = row + j / kRuns, head = j % kRuns * 8 + threadIdx.x % 4 * 2;
    const float2 w = own < rows ? *reinterpret_cast<const float2*>(weight + int64(own) * kHeads + head)
                                : make_float2(0.0f, 0.0f);
    held[2 * j] = w.x;
    held[2 * j + 1] = w.y;
  }
}

__device__ __forceinline__ int clamped(int64 length, int width) {
  return static_cast<int>(length < 0 ? 0 : length > width ? width : length);
}

// Where groups of rows end, counted in key tiles: an inclusive prefix sum.
struct Ends {
  int ends[kMostGroups];
  int warp_sums[kMostWarps];
};

// The share of this block: tiles `at` to `last` - 1 of all, counted over groups in order; `group` holds the first.
struct Share {
  int at;
  int last;
  int group;
};

template <int kBlockRows, int kThreads>
__device__ Share scan_lengths(Ends& shared, const Index& lengths, int rows, int groups, int width) {
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  const int chunk = (groups + kThreads - 1) / kThreads;
  const int begin = min(groups, thread * chunk), end = min(groups, begin + chunk);
  int tiles = 0;
  for (int group = begin; group < end; ++group) {
    int longest = 0;
    for (int row = group * kBlockRows; row < min(rows, (group + 1) * kBlockRows); ++row) {
      longest = max(longest, clamped(lengths[row], width));
    }
    tiles += (longest + kKeys - 1) / kKeys;
    shared.ends[group] = tiles;
  }
  int before = tiles;
#pragma unroll
  for (int step = 1; step < kWarp; step <<= 1) {
    const int other = __shfl_up_sync(0xffffffffu, before, step);
    if (lane >= step) before += other;
  }
  if (lane == kWarp - 1) shared.warp_sums[warp] = before;
  before -= tiles;
  __syncthreads();
  int total = 0;
  for (int other = 0; other < kThreads / kWarp; ++other) {
    if (other == warp) before += total;
    total += shared.warp_sums[other];
  }
  for (int group = begin; group < end; ++group) shared.ends[group] += before;
  __syncthreads();
  Share share;
  share.at = static_cast<int>(int64(total) * blockIdx.x / gridDim.x);
  share.last = static_cast<int>(int64(total) * (blockIdx.x + 1) / gridDim.x);
  int low = 0, high = groups;  // the first group that ends after `at`
  while (low < high) {
    const int middle = (low + high) / 2;
    if (shared.ends[middle] <= share.at) low = middle + 1; else high = middle;
  }
  share.group = low;
  return share;
}

// Tiles first to stop - 1 of one group: what a block works on between two loads of queries.
struct Unit {
  int group;
  int first;
  int stop;
};

// Takes the next unit off a share; false when it is used up.
__device__ __forceinline__ bool next_unit(Share& share, const Ends& shared, Unit& unit) {
  if (share.at >= share.last) return false;
  while (shared.ends[share.group] <= share.at) ++share.group;
  const int base = share.group ? shared.ends[share.group - 1] : 0;
  const int end = min(shared.ends[share.group], share.last);
  unit = {share.group, share.at - base, end - base};
  share.at = end;
  return true;
}

// Where the keys of a request lie.
struct Keys {
  const TensorMap* map;
  Index table;           // page table of every request; data is null where keys are contiguous
  int64 table_stride;
  Index request;         // request of each row; data is null for request row / next_n
  int64 next_n;

  __device__ __forceinline__ bool paged() const { return table.data != nullptr; }

  // Start of the page table of the request that owns `row`.
  __device__ __forceinline__ int64 base(int64 row) const {
    if (!paged()) return 0;
    return (request.data ? request[row] : row / next_n) * table_stride;
  }
};

// Copies key tile `block` to `target`: a page, or 64 rows of contiguous keys.
__device__ __forceinline__ void copy_keys(
    unsigned char* target, const Keys& keys, uint64* barrier, int block, int page, uint64 policy) {
  expect(barrier, kKeyBytes);
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
    copy_tile(
        target + atom * kKeyAtomBytes, keys.map, barrier, atom * kAtom, keys.paged() ? 0 : block * kKeys, page, policy);
  }
}

// Writes `fill` past the length of rows blockIdx.x, blockIdx.x + gridDim.x, ...: one warp of `warps`.
__device__ __forceinline__ void fill_rows(
    const Index& lengths, float* out, int64 out_stride, int rows, int width, float fill, int warp, int warps) {
  const int lane = threadIdx.x % kWarp;
  for (int64 row = int64(blockIdx.x) * warps + warp; row < rows; row += int64(gridDim.x) * warps) {
    for (int at = clamped(lengths[row], width) + lane; at < width; at += kWarp) out[row * out_stride + at] = fill;
  }
}

// Makes barriers that one thread has initialised visible to the others and to the copy engine.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ int role_of_thread() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace hopper

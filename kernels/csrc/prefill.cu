// Index scores of a long prefill on Hopper: score[r, e] = sum over heads of weight[r, h] * ReLU(q[r, h] . k[e]).
//
// A block serves eight consecutive query rows of one request: each of two warpgroups multiplies tiles of 64 keys by the
// 64 heads of four rows. Keys and queries arrive through the copy engine, in the tensor cores' swizzled layout; a third
// warpgroup feeds a ring of key tiles that both read. The two take turns at the tensor cores, so that one reduces its
// products to scores while the other multiplies, and the reduction costs no time of its own.
//
// Blocks are persistent. Every one takes an equal share of all key tiles of all rows, found by a prefix sum over lengths.
//
// Needs sm_90a (wgmma, setmaxnreg, bulk tensor copies); other GPUs run the Triton kernel.

using int64 = long long;
using uint64 = unsigned long long;
using uint32 = unsigned int;

namespace {

constexpr int kDim = 128;
constexpr int kHeads = 64;
constexpr int kKeys = 64;           // keys of a tile
constexpr int kRows = 4;            // query rows of a warpgroup
constexpr int kGroups = 2;          // warpgroups that multiply
constexpr int kBlockRows = kRows * kGroups;
constexpr int kStages = 5;          // key tiles in flight
constexpr int kMostGroups = 4096;   // groups of eight rows whose lengths a block can scan
constexpr int kWarpgroup = 128;
constexpr int kThreads = kWarpgroup * (kGroups + 1);
constexpr int kWarp = 32;
constexpr int kWarps = kWarpgroup / kWarp;
constexpr int kFeedRegisters = 40;  // of 168 at launch; what the feeding warpgroup gives up, the others take
constexpr int kMultiplyRegisters = 232;

constexpr int kAtom = 64;           // bf16 elements of a swizzled row: 128 bytes
constexpr int kAtomBytes = 128;
constexpr int kAtoms = kDim / kAtom;
constexpr int kKeyAtomBytes = kKeys * kAtomBytes;
constexpr int kKeyBytes = kKeyAtomBytes * kAtoms;
constexpr int kQueryAtomBytes = kRows * kHeads * kAtomBytes;
constexpr int kQueryBytes = kQueryAtomBytes * kAtoms;
constexpr int kDepth = 16;          // elements of dim that one wgmma sums
constexpr int kStepsPerAtom = kAtom / kDepth;
constexpr int kStepBytes = kDepth * 2;
constexpr int kProducts = kRows * kHeads * kKeys / kWarpgroup;  // accumulators of a thread

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

struct Shared {
  alignas(1024) unsigned char query[kGroups][kQueryBytes];
  alignas(1024) unsigned char keys[kStages][kKeyBytes];
  int ends[kMostGroups];           // inclusive prefix sum of each group's key tiles
  int warp_sums[kThreads / kWarp];
  alignas(8) uint64 full[kStages];
  uint64 empty[kStages];
  uint64 query_full[kGroups];
  uint64 query_empty[kGroups];
  uint64 turn[kGroups];
};
static_assert(sizeof(Shared) + 1024 == 231424, "SHARED_BYTES of prefill_cuda.py");

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

__device__ __forceinline__ void copy_tile(
    void* target, const TensorMap* map, uint64* barrier, int dim, int row, int page) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
          address(target)),
      "l"(map), "r"(address(barrier)), "r"(dim), "r"(row), "r"(page)
      : "memory");
}

// Matrix descriptor of a K-major operand in rows of 128 swizzled bytes: eight rows lie 1,024 bytes apart.
__device__ __forceinline__ uint64 descriptor(uint32 at) {
  constexpr uint64 kSwizzle128 = uint64(1) << 62, kEightRows = uint64(1024 >> 4) << 32, kUnused = uint64(1) << 16;
  return kSwizzle128 | kEightRows | kUnused | uint64((at & 0x3ffff) >> 4);
}

__device__ __forceinline__ void fence_registers(float (&d)[kProducts]) {
#pragma unroll
  for (int i = 0; i < kProducts; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define R8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define R64(d, i) \
  R8(d, i), R8(d, i + 8), R8(d, i + 16), R8(d, i + 24), R8(d, i + 32), R8(d, i + 40), R8(d, i + 48), R8(d, i + 56)

// d[64 keys, 256 columns] (+)= keys[64, 16] x query[256, 16]^T.
__device__ __forceinline__ void multiply_step(float (&d)[kProducts], uint64 keys, uint64 query, int add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, add, 1, 1, 0, 0;\n"
      "}\n"
      : R64(d, 0), R64(d, 64)
      : "l"(keys), "l"(query), "r"(add));
}

// Starts the product of a tile: 64 keys by the heads of four rows.
__device__ __forceinline__ void multiply(float (&d)[kProducts], uint32 keys, uint32 query) {
  fence_registers(d);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
    for (int step = 0; step < kStepsPerAtom; ++step) {
      multiply_step(
          d, descriptor(keys + atom * kKeyAtomBytes + step * kStepBytes),
          descriptor(query + atom * kQueryAtomBytes + step * kStepBytes), atom + step);
    }
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void finish(float (&d)[kProducts]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  fence_registers(d);
}

// One row as its thread writes it: where, and how many keys it sees.
struct Target {
  float* scores;
  int length;
};

// Reduces 64 keys by four rows to scores and writes them. A thread holds keys l / 4 and l / 4 + 8 of its warp's sixteen,
// and columns 8 j + 2 (l % 4) + {0, 1}. ReLU is (x + |x|) * (w / 2): max(x, 0) * w bit for bit, and NaN stays NaN.
// After two exchanges lane l holds the scores of rows l & 1 and 2 + (l & 1), and key l / 4 + 4 (l & 2).
__device__ __forceinline__ void write_scores(
    const float (&d)[kProducts], const float (&half_weight)[kRows * kHeads / 4], const Target (&target)[kRows / 2],
    int key) {
  constexpr int kRuns = kHeads / 8;  // runs of eight columns that belong to a row
  const bool second_row = threadIdx.x & 1, second_key = threadIdx.x & 2;
#pragma unroll
  for (int pair = 0; pair < kRows / 2; ++pair) {
    float sum[2][2] = {};
#pragma unroll
    for (int j = 0; j < kRuns; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int run = (pair * 2 + row) * kRuns + j;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float x = d[run * 4 + r * 2 + c];
            sum[row][r] = fmaf(x + fabsf(x), half_weight[run * 2 + c], sum[row][r]);
          }
        }
      }
    }
    float kept[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      kept[r] = (second_row ? sum[1][r] : sum[0][r]) +
                __shfl_xor_sync(0xffffffffu, second_row ? sum[0][r] : sum[1][r], 1);
    }
    const float score = (second_key ? kept[1] : kept[0]) +
                        __shfl_xor_sync(0xffffffffu, second_key ? kept[0] : kept[1], 2);
    if (key < target[pair].length) target[pair].scores[key] = score;
  }
}

__device__ __forceinline__ int clamped(int64 length, int width) {
  return static_cast<int>(length < 0 ? 0 : length > width ? width : length);
}

// The share of this block: tiles first to last - 1 of all, counted over groups in order; `ends` as in Shared.
struct Share {
  int at;
  int last;
  int group;
};

__device__ Share scan_lengths(Shared& shared, const Index& lengths, int rows, int groups, int width) {
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
__device__ __forceinline__ bool next_unit(Share& share, const Shared& shared, Unit& unit) {
  if (share.at >= share.last) return false;
  while (shared.ends[share.group] <= share.at) ++share.group;
  const int base = share.group ? shared.ends[share.group - 1] : 0;
  const int end = min(shared.ends[share.group], share.last);
  unit = {share.group, share.at - base, end - base};
  share.at = end;
  return true;
}

struct Keys {
  const TensorMap* map;
  Index table;           // page table of every request; data is null where keys are contiguous
  int64 table_stride;
  Index request;         // request of each row; data is null for request row / next_n
  int64 next_n;
};

// Feeds queries and key tiles to the warpgroups that multiply; one thread.
__device__ __forceinline__ void produce(
    Shared& shared, Share share, const TensorMap* query_map, const Keys& keys) {
  Unit unit;
  int tile = 0;
  for (int number = 0; next_unit(share, shared, unit); ++number) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      wait(&shared.query_empty[group], (number & 1) ^ 1);
      expect(&shared.query_full[group], kQueryBytes);
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom) {
        copy_tile(
            shared.query[group] + atom * kQueryAtomBytes, query_map, &shared.query_full[group], atom * kAtom,
            (unit.group * kBlockRows + group * kRows) * kHeads, 0);
      }
    }
    const int64 row = int64(unit.group) * kBlockRows;
    const bool paged = keys.table.data != nullptr;
    const int64 base = paged ? (keys.request.data ? keys.request[row] : row / keys.next_n) * keys.table_stride : 0;
    for (int block = unit.first; block < unit.stop; ++block, ++tile) {
      const int stage = tile % kStages;
      const int page = paged ? static_cast<int>(keys.table[base + block]) : 0;
      wait(&shared.empty[stage], ((tile / kStages) & 1) ^ 1);
      expect(&shared.full[stage], kKeyBytes);
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom) {
        copy_tile(
            shared.keys[stage] + atom * kKeyAtomBytes, keys.map, &shared.full[stage], atom * kAtom,
            paged ? 0 : block * kKeys, page);
      }
    }
  }
}

// Multiplies and reduces: one warpgroup, rows group * 8 + number * 4 to + 3.
__device__ __forceinline__ void consume(
    Shared& shared, Share share, int number, const float* __restrict__ weight, const Index& lengths, float* out,
    int64 out_stride, int rows, int width) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kWarpgroup / kWarp;
  const int key_of_thread = warp * 16 + lane / 4 + (lane & 2) * 4;
  const bool leader = threadIdx.x % kWarpgroup == 0;
  const uint32 query = address(shared.query[number]);
  float products[kProducts], half_weight[kRows * kHeads / 4];
  Unit unit;
  int tile = 0;
  for (int count = 0; next_unit(share, shared, unit); ++count) {
    const int base_row = unit.group * kBlockRows + number * kRows;
#pragma unroll
    for (int j = 0; j < kRows * kHeads / 8; ++j) {
      const int row = base_row + j * 8 / kHeads, head = j * 8 % kHeads + lane % 4 * 2;
      const float2 w = row < rows ? *reinterpret_cast<const float2*>(weight + int64(row) * kHeads + head)
                                  : make_float2(0.0f, 0.0f);
      half_weight[2 * j] = 0.5f * w.x;
      half_weight[2 * j + 1] = 0.5f * w.y;
    }
    Target target[kRows / 2];
#pragma unroll
    for (int pair = 0; pair < kRows / 2; ++pair) {
      const int row = base_row + pair * 2 + (lane & 1);
      target[pair].scores = out + int64(row) * out_stride;
      target[pair].length = row < rows ? clamped(lengths[row], width) : 0;
    }
    wait(&shared.query_full[number], count & 1);
    int key = unit.first * kKeys + key_of_thread;
    for (int block = unit.first; block < unit.stop; ++block, key += kKeys, ++tile) {
      const int stage = tile % kStages;
      wait(&shared.full[stage], (tile / kStages) & 1);
      wait(&shared.turn[number], (tile & 1) ^ (number == 0));
      multiply(products, address(shared.keys[stage]), query);
      if (leader) arrive(&shared.turn[number ^ 1]);
      finish(products);
      if (lane == 0) arrive(&shared.empty[stage]);
      write_scores(products, half_weight, target, key);
    }
    if (lane == 0) arrive(&shared.query_empty[number]);
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
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  const Share share = scan_lengths(shared, lengths, rows, groups, width);
  const int role = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (role == kGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kFeedRegisters));
    const int warp = threadIdx.x % kWarpgroup / kWarp;
    if (warp == 0) {
      if (threadIdx.x % kWarp == 0) {
        produce(shared, share, &query_map, Keys{&key_map, table, table_stride, request, next_n});
      }
    } else if (filled) {
      fill_rows(lengths, out, out_stride, rows, width, fill, warp - 1, kWarps - 1);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplyRegisters));
    consume(shared, share, role, weight, lengths, out, out_stride, rows, width);
  }
}

// Index keys and queries of DeepSeek-V4: norm (keys), RoPE on dims 64..127, Hadamard transform of 128, one rounding to bf16.
//
// Eight lanes hold one entry of 128 dims. Lane l holds dims 64 j + 8 l + c (j from 0 to 1, c from 0 to 7), so that bf16
// moves in words of 16 bytes and run 1 is the half that RoPE turns. Butterfly stages on bits 0, 1, 2 and 6 of the dim stay in
// a lane; those on bits 3, 4 and 5 exchange values with lane l ^ 1, 2 or 4.
//
// No header; compiles for sm_80 and later. From sm_90 on a kernel may be launched before the one ahead of it in the stream has
// ended (programmatic dependent launch): it then waits for that one's writes before it reads anything.

using int64 = long long;
using uint32 = unsigned int;
using uint16 = unsigned short;

namespace {

constexpr int kDim = 128;
constexpr int kRopeDim = 64;
constexpr int kLanes = 8;        // lanes of an entry
constexpr int kRuns = 2;       // runs of dims a lane holds
constexpr int kRun = 8;        // dims of a run
constexpr int kRunStride = 64; // dims between a lane's runs
constexpr int kRopeRun = 1;    // the run within dims 64..127
constexpr int kVector = 4;     // floats of a vector access
constexpr float kHadamardScale = 0.08838834764831845f; // 128^-0.5
constexpr int64 kPageEntries = 64;

__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

struct Entry {
  float value[kRuns][kRun];
};

__device__ __forceinline__ uint32 pack_bf16(float low, float high) {
  uint32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float low_bf16(uint32 packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float high_bf16(uint32 packed) { return __uint_as_float(packed & 0xffff0000u); }

__device__ __forceinline__ void load(float* __restrict__ run, const float* __restrict__ source) {
#pragma unroll
  for (int c = 0; c < kRun; c += kVector) {
    const float4 x = *reinterpret_cast<const float4*>(source + c);
    run[c] = x.x;
    run[c + 1] = x.y;
    run[c + 2] = x.z;
    run[c + 3] = x.w;
  }
}

// Multiplies the pairs of dims 64..127 by cosine and sine, interleaved in `t`: the lane's run of a table row.
__device__ __forceinline__ void rotate(Entry& entry, const float* t) {
  float* v = entry.value[kRopeRun];
#pragma unroll
  for (int c = 0; c < kRun; c += 2) {
    const float real = v[c], imaginary = v[c + 1];
    v[c] = real * t[c] - imaginary * t[c + 1];
    v[c + 1] = real * t[c + 1] + imaginary * t[c];
  }
}

__device__ __forceinline__ void butterfly(float& left, float& right) {
  const float sum = left + right;
  right = left - right;
  left = sum;
}

// Sylvester order, unscaled: stages on dim bits 0 to 6.
__device__ __forceinline__ void hadamard(Entry& entry, int lane) {
#pragma unroll
  for (int j = 0; j < kRuns; ++j) {
#pragma unroll
    for (int step = 1; step < kRun; step <<= 1) {
#pragma unroll
      for (int c = 0; c < kRun; ++c) {
        if ((c & step) == 0) butterfly(entry.value[j][c], entry.value[j][c | step]);
      }
    }
  }
#pragma unroll
  for (int mask = 1; mask < kLanes; mask <<= 1) {
    const float sign = (lane & mask) ? -1.0f : 1.0f;
#pragma unroll
    for (int j = 0; j < kRuns; ++j) {
#pragma unroll
      for (int c = 0; c < kRun; ++c) {
        const float other = __shfl_xor_sync(0xffffffffu, entry.value[j][c], mask, kLanes);
        entry.value[j][c] = fmaf(sign, entry.value[j][c], other);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kRun; ++c) butterfly(entry.value[0][c], entry.value[1][c]);
}

// Rounds the scaled entry to bf16 and writes it to 128 contiguous elements.
__device__ __forceinline__ void write(const Entry& entry, uint16* __restrict__ target, int lane) {
#pragma unroll
  for (int j = 0; j < kRuns; ++j) {
    const float* v = entry.value[j];
    uint4 packed;
    packed.x = pack_bf16(v[0] * kHadamardScale, v[1] * kHadamardScale);
    packed.y = pack_bf16(v[2] * kHadamardScale, v[3] * kHadamardScale);
    packed.z = pack_bf16(v[4] * kHadamardScale, v[5] * kHadamardScale);
    packed.w = pack_bf16(v[6] * kHadamardScale, v[7] * kHadamardScale);
    *reinterpret_cast<uint4*>(target + j * kRunStride + lane * kRun) = packed;
  }
}

// Integers of 4 or 8 bytes.
struct Index {
  const void* data;
  int64 wide;
  __device__ __forceinline__ int64 operator[](int64 at) const {
    return wide ? static_cast<const int64*>(data)[at] : static_cast<const int*>(data)[at];
  }
};

// Where an entry of a store comes from and goes to: its RoPE position and its slot, each negative for none. Told apart so that
// the row of the table is on its way while the slot still is.
struct Place {
  int64 position;
  int64 slot;
};

// Plain arrays: one position and one slot a row.
struct Rows {
  Index positions;
  Index slots;
  __device__ Place operator()(int64 row) const {
    const int64 position = positions[row], slot = slots[row];
    return {slot < 0 ? -1 : position, slot};
  }
};

// SGLang's prefill compress plan, 16 bytes a row: uint32 seq_len (all ones: no entry), uint16 ragged_id, 10 more bytes.
// The slot is that of the query token `ragged_id`.
struct PrefillPlan {
  const uint4* plan;
  const int64* out_loc;
  int ratio;
  __device__ Place operator()(int64 row) const {
    const uint4 item = plan[row];
    if (item.x == 0xffffffffu) return {-1, -1};
    return {int64(item.x) - ratio, out_loc[item.y & 0xffffu]};
  }
};

// SGLang's decode plan, 16 bytes a request: uint32 seq_len, 12 more bytes. An entry is complete at a multiple of the ratio.
struct DecodePlan {
  const uint4* plan;
  const int64* out_loc;
  int ratio;
  __device__ Place operator()(int64 row) const {
    const int64 length = plan[row].x;
    if (length % ratio != 0) return {-1, -1};
    return {length - ratio, out_loc[row]};
  }
};

template <typename Source>
__device__ __forceinline__ void store_entry(
    const float* __restrict__ pooled, const float* __restrict__ norm_weight, const float* __restrict__ table,
    const Source& source, unsigned char* __restrict__ cache, int64 page_stride, float eps, int64 rows) {
  wait_for_kernel_before();
  const int lane = threadIdx.x % kLanes;
  const int64 row = (int64(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  const bool inside = row < rows;
  Entry entry = {};
  float squares = 0.0f, turn[kRun] = {}, w[kRuns][kRun];
  // Loads leave in the order of the program, so those that wait for another one come last.
#pragma unroll
  for (int j = 0; j < kRuns; ++j) {
    if (inside) load(entry.value[j], pooled + row * kDim + j * kRunStride + lane * kRun);
    load(w[j], norm_weight + j * kRunStride + lane * kRun);
  }
  const Place place = inside ? source(row) : Place{-1, -1};
  if (place.position >= 0) load(turn, table + place.position * kRopeDim + lane * kRun);
#pragma unroll
  for (int j = 0; j < kRuns; ++j) {
#pragma unroll
    for (int c = 0; c < kRun; ++c) squares += entry.value[j][c] * entry.value[j][c];
  }
#pragma unroll
  for (int mask = 1; mask < kLanes; mask <<= 1) squares += __shfl_xor_sync(0xffffffffu, squares, mask, kLanes);
  const float factor = __fdiv_rn(1.0f, __fsqrt_rn(squares / kDim + eps));
#pragma unroll
  for (int j = 0; j < kRuns; ++j) {
#pragma unroll
    for (int c = 0; c < kRun; ++c) entry.value[j][c] = entry.value[j][c] * factor * w[j][c];
  }
  if (place.position >= 0) rotate(entry, turn);
  hadamard(entry, lane);
  if (place.slot >= 0) {
    unsigned char* page = cache + place.slot / kPageEntries * page_stride;
    write(entry, reinterpret_cast<uint16*>(page) + place.slot % kPageEntries * kDim, lane);
  }
  let_next_kernel_start();
}

}  // namespace

#define STORE_ARGUMENTS                                                                                               \
  const float *__restrict__ pooled, const float *__restrict__ norm_weight, const float *__restrict__ table,            \
      unsigned char *__restrict__ cache, int64 page_stride, float eps, int64 rows

extern "C" __global__ void __launch_bounds__(256)
store_rows(STORE_ARGUMENTS, const Index positions, const Index slots) {
  store_entry(pooled, norm_weight, table, Rows{positions, slots}, cache, page_stride, eps, rows);
}

extern "C" __global__ void __launch_bounds__(256)
store_prefill_plan(STORE_ARGUMENTS, const uint4* __restrict__ plan, const int64* __restrict__ out_loc, int ratio) {
  store_entry(pooled, norm_weight, table, PrefillPlan{plan, out_loc, ratio}, cache, page_stride, eps, rows);
}

extern "C" __global__ void __launch_bounds__(256)
store_decode_plan(STORE_ARGUMENTS, const uint4* __restrict__ plan, const int64* __restrict__ out_loc, int ratio) {
  store_entry(pooled, norm_weight, table, DecodePlan{plan, out_loc, ratio}, cache, page_stride, eps, rows);
}

// Queries bf16 [rows, heads, 128] -> bf16, and head weights bf16 [rows, heads] -> fp32 times `weight_scale` (when given).
extern "C" __global__ void __launch_bounds__(256)
prepare_query(
    const uint16* __restrict__ query, const float* __restrict__ table, const Index positions,
    uint16* __restrict__ out, const uint16* __restrict__ weight, float* __restrict__ weight_out, float weight_scale,
    int heads, int64 count) {
  uint16 head_weight = 0;
  wait_for_kernel_before();
  const int lane = threadIdx.x % kLanes;
  const int64 item = (int64(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  const bool inside = item < count;
  Entry entry = {};
  if (inside) {
    const int64 position = positions[static_cast<uint32>(item) / static_cast<uint32>(heads)];
    if (weight_out != nullptr && lane == 0) head_weight = weight[item];
    uint4 words[kRuns];
#pragma unroll
    for (int j = 0; j < kRuns; ++j) {
      words[j] = *reinterpret_cast<const uint4*>(query + item * kDim + j * kRunStride + lane * kRun);
    }
    float turn[kRun];
    load(turn, table + position * kRopeDim + lane * kRun);
#pragma unroll
    for (int j = 0; j < kRuns; ++j) {
      const uint4 x = words[j];
      float* v = entry.value[j];
      v[0] = low_bf16(x.x);
      v[1] = high_bf16(x.x);
      v[2] = low_bf16(x.y);
      v[3] = high_bf16(x.y);
      v[4] = low_bf16(x.z);
      v[5] = high_bf16(x.z);
      v[6] = low_bf16(x.w);
      v[7] = high_bf16(x.w);
    }
    rotate(entry, turn);
  }
  hadamard(entry, lane);
  if (inside) {
    write(entry, out + item * kDim, lane);
    if (weight_out != nullptr && lane == 0) weight_out[item] = low_bf16(head_weight) * weight_scale;
  }
  let_next_kernel_start();
}

// Copies of rows at a pitch within a device: boxes, as the driver's cuMemcpy3DAsync takes them,
// many in one launch. Each is a CUDA_MEMCPY3D, read as 25 numbers.

constexpr int BOXES = 20;  // a launch takes 4 KiB of parameters

struct Box { unsigned long long field[25]; };
struct Boxes { Box box[BOXES]; };

template <typename T>
static __device__ void copy(const unsigned long long* field) {
    const char* source = reinterpret_cast<const char*>(field[6]);
    char* target = reinterpret_cast<char*>(field[17]);
    const unsigned long long source_pitch = field[9], source_rows = field[10];
    const unsigned long long target_pitch = field[20], target_rows = field[21];
    const unsigned long long width = field[22] / sizeof(T), height = field[23];
    const unsigned long long rows = height * field[24];
    const unsigned long long first = blockIdx.z * blockDim.x + threadIdx.x;
    for (unsigned long long row = blockIdx.y * blockDim.y + threadIdx.y; row < rows;
         row += gridDim.y * blockDim.y) {
        const unsigned long long plane = row / height, y = row - plane * height;
        const T* from = reinterpret_cast<const T*>(source + (plane * source_rows + y) * source_pitch);
        T* to = reinterpret_cast<T*>(target + (plane * target_rows + y) * target_pitch);
        for (unsigned long long x = first; x < width; x += gridDim.z * blockDim.x) to[x] = from[x];
    }
}

// Grid: one box for each x, its rows over y, its columns over z.
extern "C" __global__ void copy_boxes(const __grid_constant__ Boxes boxes) {
    const unsigned long long* field = boxes.box[blockIdx.x].field;
    const unsigned long long all = field[6] | field[9] | field[17] | field[20] | field[22];
    if (all % 16 == 0) copy<int4>(field);
    else if (all % 4 == 0) copy<int>(field);
    else copy<char>(field);
}

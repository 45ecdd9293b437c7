# The CUDA backend. TURBOMILL_CUDA=AUTO builds it where a CUDA compiler and cuBLAS's headers are found, ON
# insists, OFF leaves it out. Defines `kernels_cuda` when it is built.
set(TURBOMILL_CUDA AUTO CACHE STRING "Build the CUDA backend: AUTO, ON or OFF")
set(TURBOMILL_CUDA_ARCHITECTURES "80;90a" CACHE STRING "GPU architectures to compile machine code for")

set(TURBOMILL_CUDA_FOUND FALSE)
if(TURBOMILL_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  find_package(CUDAToolkit QUIET)
  find_path(CUBLASLT_INCLUDE_DIR cublasLt.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_library(CUBLASLT_LIBRARY NAMES cublasLt libcublasLt.so.13 libcublasLt.so.12
               HINTS ${CUDAToolkit_LIBRARY_DIR})
  if(CMAKE_CUDA_COMPILER AND CUDAToolkit_FOUND AND CUBLASLT_INCLUDE_DIR AND CUBLASLT_LIBRARY)
    set(TURBOMILL_CUDA_FOUND TRUE)
  elseif(NOT TURBOMILL_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "TURBOMILL_CUDA is ${TURBOMILL_CUDA}, but a CUDA compiler (${CMAKE_CUDA_COMPILER}), "
                        "cublasLt.h (${CUBLASLT_INCLUDE_DIR}) or libcublasLt (${CUBLASLT_LIBRARY}) is missing")
  endif()
endif()
message(STATUS "CUDA backend: ${TURBOMILL_CUDA_FOUND}")

if(TURBOMILL_CUDA_FOUND)
  # Machine code only: a GPU that is not in the list is refused in a sentence, not compiled for at start.
  list(TRANSFORM TURBOMILL_CUDA_ARCHITECTURES APPEND "-real" OUTPUT_VARIABLE CMAKE_CUDA_ARCHITECTURES)
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  add_library(kernels_cuda OBJECT
    csrc/kernels/cuda/attention_any.cu
    csrc/kernels/cuda/attention_decode.cu
    csrc/kernels/cuda/attention_decode_plain.cu
    csrc/kernels/cuda/attention_decode_k8v4.cu
    csrc/kernels/cuda/attention_decode_e4m3.cu
    csrc/kernels/cuda/attention_decode_e5m2.cu
    csrc/kernels/cuda/attention_decode_4.cu
    csrc/kernels/cuda/attention_decode_8.cu
    csrc/kernels/cuda/attention_prompt.cu
    csrc/kernels/cuda/attention_prompt_bf16.cu
    csrc/kernels/cuda/attention_prompt_f16.cu
    csrc/kernels/cuda/attention_tensor.cu
    csrc/kernels/cuda/attention_tensor_plain.cu
    csrc/kernels/cuda/attention_tensor_k8v4.cu
    csrc/kernels/cuda/attention_tensor_e4m3.cu
    csrc/kernels/cuda/attention_tensor_e5m2.cu
    csrc/kernels/cuda/attention_tensor_4.cu
    csrc/kernels/cuda/attention_tensor_8.cu
    csrc/kernels/cuda/dense_fused.cu
    csrc/kernels/cuda/elementwise.cu
    csrc/kernels/cuda/fault.cu
    csrc/kernels/cuda/fused_linear.cu
    csrc/kernels/cuda/grouped_dense.cu
    csrc/kernels/cuda/grouped_dense_wgmma.cu
    csrc/kernels/cuda/kv_unpack.cu
    csrc/kernels/cuda/logits.cu
    csrc/kernels/cuda/moe.cu
    csrc/kernels/cuda/overlap.cu
    csrc/kernels/cuda/rope_cache.cu
    csrc/kernels/cuda/sampling.cu
    csrc/kernels/cuda/w4_dequantize.cu
    csrc/kernels/cuda/w4_few_rows.cu
    csrc/kernels/cuda/w4_fused_bf16.cu
    csrc/kernels/cuda/w4_fused_f16.cu
    csrc/kernels/cuda/w4_grouped.cu
    csrc/kernels/cuda/w4_grouped_bf16.cu
    csrc/kernels/cuda/w4_grouped_f16.cu
    csrc/kernels/cuda/w8_dequantize.cu
    csrc/kernels/cuda/w8_fused_bf16.cu
    csrc/kernels/cuda/w8_fused_f16.cu
    csrc/kernels/cuda/w8_rows.cu
    csrc/kernels/cuda/attention_choice.cc
    csrc/kernels/cuda/backend.cc
    csrc/kernels/cuda/backend_layers.cc
    csrc/kernels/cuda/backend_output.cc
    csrc/kernels/cuda/device.cc
    csrc/kernels/cuda/device_weights.cc
    csrc/kernels/cuda/edits.cc
    csrc/kernels/cuda/fused_plan.cc
    csrc/kernels/cuda/gemm.cc
    csrc/kernels/cuda/graphs.cc
    csrc/kernels/cuda/linear.cc
    csrc/kernels/cuda/memory.cc
    csrc/kernels/cuda/moe.cc
    csrc/kernels/cuda/rope_table.cc
    csrc/kernels/cuda/step.cc
    csrc/kernels/cuda/stream.cc
    csrc/kernels/cuda/tiles.cc)
  target_include_directories(kernels_cuda PUBLIC csrc ${CUBLASLT_INCLUDE_DIR} ${CUDAToolkit_INCLUDE_DIRS})
  target_compile_definitions(kernels_cuda PUBLIC TM_CUDA)
  target_compile_options(kernels_cuda PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>
                         $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>)
  target_link_libraries(kernels_cuda PUBLIC CUDA::cudart_static ${CUBLASLT_LIBRARY})
endif()

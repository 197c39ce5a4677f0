if(TARGET kernels_cpu)
  keepd_test(test_ops SOURCES test_ops.c LIBS kernels_cpu)
  keepd_test(test_quantize SOURCES test_quantize.c LIBS kernels_cpu)
  keepd_test(test_attend SOURCES test_attend.c LIBS kernels_cpu)
  keepd_test(test_math SOURCES test_math.c LIBS kernels_cpu)
  keepd_test(test_number SOURCES test_number.c LIBS kernels_cpu)
  keepd_test(test_cpu SOURCES test_cpu.c LIBS kernels_cpu)
  keepd_plain_test(test_pool SOURCES test_pool.c LIBS kernels_cpu)
endif()
# Products of the path for tiles on any processor with AVX-512 and bf16: its source over tiles that are
# memory, which stands before that of kernels_cpu.
if(TARGET kernels_amx)
  add_library(kernels_tiles OBJECT ${CMAKE_SOURCE_DIR}/kernels/cpu/amx_matmul.c)
  target_link_libraries(kernels_tiles PRIVATE keepd_flags)
  target_compile_options(kernels_tiles PRIVATE -O3 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma
    -mf16c -mavx512bf16 -mamx-tile -mamx-bf16 -include ${CMAKE_CURRENT_SOURCE_DIR}/tiles.h)
  set_source_files_properties(tiles.c PROPERTIES COMPILE_OPTIONS -O3)
  keepd_test(test_ops_tiles SOURCES test_ops.c tiles.c $<TARGET_OBJECTS:kernels_tiles>
    LIBS kernels_cpu)
endif()

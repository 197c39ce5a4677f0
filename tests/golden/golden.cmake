# Shared by the model's unit tests and tests/python/test_golden.py.
set(KEEPD_REPLAY ${CMAKE_SOURCE_DIR}/tests/golden/replay.c)
if(NOT KEEPD_FUZZ)
  add_executable(golden_logits ${CMAKE_SOURCE_DIR}/tests/golden/golden_logits.c ${KEEPD_REPLAY})
  target_link_libraries(golden_logits PRIVATE engine_model kernels_cpu paging)
  set_target_properties(golden_logits PROPERTIES RUNTIME_OUTPUT_DIRECTORY
                        ${CMAKE_BINARY_DIR}/tests/golden)
endif()

# replay.c: shared by the model's unit tests and the drivers. The drivers are run by tests/python:
# golden_logits by test_golden.py, policy_replay by test_policy_replay.py, block_logits by test_block.py,
# vision_rows and picture_tiles by test_vision.py.
set(KEEPD_REPLAY ${CMAKE_SOURCE_DIR}/tests/golden/replay.c)
if(NOT KEEPD_FUZZ)
  add_executable(golden_logits ${CMAKE_SOURCE_DIR}/tests/golden/golden_logits.c ${KEEPD_REPLAY}
                 ${CMAKE_SOURCE_DIR}/engine/steps/grid.c)
  target_link_libraries(golden_logits PRIVATE model kernels_ranks paging)
  add_executable(policy_replay ${CMAKE_SOURCE_DIR}/tests/golden/policy_replay.c ${KEEPD_REPLAY})
  target_link_libraries(policy_replay PRIVATE model kernels_ranks paging)
  add_executable(block_logits ${CMAKE_SOURCE_DIR}/tests/golden/block_logits.c ${KEEPD_REPLAY})
  target_link_libraries(block_logits PRIVATE model kernels_ranks paging)
  add_executable(vision_rows ${CMAKE_SOURCE_DIR}/tests/golden/vision_rows.c)
  target_link_libraries(vision_rows PRIVATE model kernels_ranks)
  add_executable(picture_tiles ${CMAKE_SOURCE_DIR}/tests/golden/picture_tiles.c)
  target_link_libraries(picture_tiles PRIVATE picture)
  set_target_properties(golden_logits policy_replay block_logits vision_rows picture_tiles PROPERTIES RUNTIME_OUTPUT_DIRECTORY
                        ${CMAKE_BINARY_DIR}/tests/golden)
endif()

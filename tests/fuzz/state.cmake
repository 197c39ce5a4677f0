keepd_fuzz(fuzz_state SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_state.c LIBS engine_state kern_cache)

keepd_fuzz(fuzz_gates SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_gates.c LIBS engine_model)

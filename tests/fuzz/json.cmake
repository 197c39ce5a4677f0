keepd_fuzz(fuzz_json SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_json.c LIBS base)

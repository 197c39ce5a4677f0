keepd_fuzz(fuzz_tok SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_tok.c LIBS engine_tok)

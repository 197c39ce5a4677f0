keepd_fuzz(fuzz_request SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_request.c LIBS server_oai fake_engine)

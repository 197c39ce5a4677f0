keepd_fuzz(fuzz_tool_calls SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_tool_calls.c LIBS server_oai fake_engine)

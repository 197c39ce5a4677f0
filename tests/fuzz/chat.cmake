keepd_fuzz(fuzz_chat SOURCES fuzz_chat.c LIBS engine_chat)

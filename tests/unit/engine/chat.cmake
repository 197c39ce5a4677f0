keepd_test(unit_chat SOURCES test_chat.c test_chat_data.c chat_test.c LIBS engine_chat)
keepd_plain_test(tsan_chat SOURCES tsan_chat.c chat_test.c LIBS engine_chat)

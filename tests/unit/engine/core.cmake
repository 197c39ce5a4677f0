keepd_test(test_seq SOURCES test_seq.c LIBS engine_sched)
keepd_test(test_conversation SOURCES test_conversation.c LIBS engine_sched)
keepd_test(test_sched SOURCES test_sched.c LIBS test_world)

keepd_test(test_tok SOURCES test_tok.c LIBS engine_tok)
keepd_test(test_tok_load SOURCES test_tok_load.c LIBS engine_tok)
keepd_plain_test(test_tok_threads SOURCES test_tok_threads.c LIBS engine_tok)
keepd_test(test_weights SOURCES test_weights.c LIBS engine_tok)

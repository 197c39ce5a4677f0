add_library(engine_chat STATIC chat.c jinja_containers.c jinja_eval.c jinja_expr.c jinja_filters.c
  jinja_format.c jinja_globals.c jinja_json.c jinja_lex.c jinja_loop.c jinja_methods.c jinja_ops.c
  jinja_parse.c jinja_print.c jinja_sequence.c jinja_tests.c jinja_text.c jinja_unicode.c
  jinja_value.c)
target_link_libraries(engine_chat PUBLIC base PkgConfig::CJSON PRIVATE PkgConfig::UTF8PROC)

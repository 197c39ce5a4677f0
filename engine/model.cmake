# The model: configuration, gates, one layer loop.
add_library(engine_model STATIC model.c model_config.c gates.c floats.c)
target_link_libraries(engine_model PUBLIC keepd_flags engine_tok engine_digest base)

add_library(engine_tok STATIC tok.c tok_added.c tok_bpe.c tok_dir.c tok_load.c tok_norm.c tok_pipe.c
                              tok_regex.c tok_split.c tok_vocab.c safetensors.c weights.c)
target_link_libraries(engine_tok PUBLIC base PRIVATE PkgConfig::PCRE2 PkgConfig::UTF8PROC)

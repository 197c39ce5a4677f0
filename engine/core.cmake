# State files and what ties them to a model.
add_library(engine_digest STATIC sha256.c identity.c)
target_link_libraries(engine_digest PUBLIC keepd_flags base PRIVATE PkgConfig::NETTLE)
add_library(engine_state STATIC conversation.c state.c state_dir.c store_index.c store.c)
target_link_libraries(engine_state PUBLIC keepd_flags engine_digest paging base)

# What decides and holds a request: sequences, the scheduler; and the engine itself.
add_library(engine_sched STATIC seq.c sched.c sched_keep.c sched_save.c trace.c)
target_link_libraries(engine_sched PUBLIC keepd_flags engine_state paging base)

if(TARGET engine_tok AND TARGET engine_chat AND TARGET engine_model AND TARGET kernels_cpu)
  add_library(engine_core STATIC backend.c engine.c replica.c text.c)
  target_link_libraries(engine_core PUBLIC engine_sched engine_model engine_chat engine_tok kernels_ranks base)
  if(TARGET kernels_cuda)
    target_compile_definitions(engine_core PRIVATE KEEPD_CUDA)
    target_link_libraries(engine_core PUBLIC kernels_cuda)
  endif()
endif()

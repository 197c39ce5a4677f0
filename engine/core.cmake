# What decides and holds a request: conversations, sequences, the scheduler; and the engine itself.
add_library(engine_sched STATIC conversation.c seq.c sched.c sched_keep.c)
target_link_libraries(engine_sched PUBLIC keepd_flags paging base)

if(TARGET engine_tok AND TARGET engine_chat AND TARGET engine_model AND TARGET kernels_cpu)
  add_library(engine_core STATIC engine.c text.c)
  target_link_libraries(engine_core PUBLIC engine_sched engine_model engine_chat engine_tok kernels_cpu base)
endif()

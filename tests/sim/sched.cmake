# Deterministic by seed; more seeds by hand: sim_sched FIRST COUNT.
keepd_plain_test(sim_sched SOURCES sim_sched.c LIBS engine_sched kernels_cpu paging base)
if(TARGET engine_core)
  keepd_plain_test(tsan_engine SOURCES tsan_engine.c LIBS engine_core)
endif()

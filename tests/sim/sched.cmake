# Deterministic by seed; more seeds by hand: sim_sched FIRST COUNT.
keepd_plain_test(sim_sched SOURCES ${CMAKE_CURRENT_LIST_DIR}/sim_sched.c LIBS engine_sched kernels_cpu paging base)
if(TARGET engine_core)
  keepd_plain_test(tsan_engine SOURCES ${CMAKE_CURRENT_LIST_DIR}/tsan_engine.c LIBS engine_core)
endif()

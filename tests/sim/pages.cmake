# Deterministic by seed; more seeds by hand: sim_pages FIRST COUNT.
if(TARGET kern_cache AND TARGET paging)
  keepd_plain_test(sim_pages SOURCES ${CMAKE_CURRENT_LIST_DIR}/sim_pages.c LIBS kern_cache paging)
endif()

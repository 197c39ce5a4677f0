# Deterministic by seed; more seeds by hand: sim_pages FIRST COUNT.
if(TARGET kern_cache AND TARGET paging)
  foreach(name sim_pages sim_ranks)
    keepd_plain_test(${name} SOURCES ${CMAKE_CURRENT_LIST_DIR}/${name}.c LIBS kern_cache paging)
  endforeach()
endif()

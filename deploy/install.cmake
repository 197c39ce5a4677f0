# Rules of `make install` and of the package. Paths in the units follow the prefix; existing settings in /etc are kept.
include(GNUInstallDirs)

set(man_page ${CMAKE_BINARY_DIR}/keepd.1)
add_custom_command(OUTPUT ${man_page} COMMAND keepd --man > ${man_page} DEPENDS keepd VERBATIM)
foreach(shell bash zsh fish)
  set(completion ${CMAKE_BINARY_DIR}/completion/${shell})
  add_custom_command(OUTPUT ${completion} COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/completion
    COMMAND keepd --completion ${shell} > ${completion} DEPENDS keepd VERBATIM)
  list(APPEND completions ${completion})
endforeach()
add_custom_target(keepd_texts DEPENDS ${man_page} ${completions})

set(model_dir ${CMAKE_INSTALL_FULL_DATADIR}/keepd/models/keepd-nano)
foreach(unit keepd.service keepd@.service keepd.conf)
  file(READ ${CMAKE_SOURCE_DIR}/deploy/${unit} text)
  string(REPLACE "/usr/bin/keepd" "${CMAKE_INSTALL_FULL_BINDIR}/keepd" text "${text}")
  string(REPLACE "# model = /var/lib/keepd/model" "model = ${model_dir}" text "${text}")
  file(WRITE ${CMAKE_BINARY_DIR}/deploy/${unit} "${text}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/deploy/${unit})
endforeach()

install(TARGETS keepd RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
if(TARGET keepd-chat)
  install(TARGETS keepd-chat RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(FILES ${man_page} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES ${CMAKE_BINARY_DIR}/completion/bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME keepd)
install(FILES ${CMAKE_BINARY_DIR}/completion/zsh DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions RENAME _keepd)
install(FILES ${CMAKE_BINARY_DIR}/completion/fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d RENAME keepd.fish)
install(FILES ${CMAKE_BINARY_DIR}/deploy/keepd.service ${CMAKE_BINARY_DIR}/deploy/keepd@.service
  ${CMAKE_SOURCE_DIR}/deploy/keepd.socket DESTINATION lib/systemd/system)
install(FILES ${CMAKE_SOURCE_DIR}/deploy/keepd.sysusers DESTINATION lib/sysusers.d RENAME keepd.conf)
install(FILES ${CMAKE_SOURCE_DIR}/deploy/keepd.tmpfiles DESTINATION lib/tmpfiles.d RENAME keepd.conf)
install(FILES ${CMAKE_SOURCE_DIR}/deploy/keepd.conf ${CMAKE_SOURCE_DIR}/deploy/grafana.json
  ${CMAKE_SOURCE_DIR}/LICENSE ${CMAKE_SOURCE_DIR}/docs/OPERATIONS.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY ${CMAKE_SOURCE_DIR}/bundled/keepd-nano DESTINATION ${CMAKE_INSTALL_DATADIR}/keepd/models)
install(DIRECTORY ${CMAKE_SOURCE_DIR}/bundled/calibration DESTINATION ${CMAKE_INSTALL_DATADIR}/keepd
  FILES_MATCHING PATTERN "*.txt" PATTERN "*.jsonl" PATTERN README.md)
install(CODE "
  set(settings \$ENV{DESTDIR}/etc/keepd/keepd.conf)
  if(EXISTS \${settings})
    message(STATUS \"Kept: \${settings}\")
  else()
    file(INSTALL ${CMAKE_BINARY_DIR}/deploy/keepd.conf DESTINATION /etc/keepd # DESTDIR is put in front
         PERMISSIONS OWNER_READ OWNER_WRITE GROUP_READ)
  endif()")

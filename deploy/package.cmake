# The Debian package: cpack -G DEB, see `make package`.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME keepd)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_CONTACT "keepd's maintainers <root@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "language-model server with a bounded key/value cache")
set(CPACK_SET_DESTDIR ON) # for /etc
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION "keepd serves language models over the OpenAI HTTP API. The key/value cache of
each conversation has a fixed budget, however long the dialogue becomes. The
package contains the daemon, systemd units and a small model for trying it.")
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_DEPENDS
  "init-system-helpers, passwd, systemd | systemd-standalone-sysusers, systemd | systemd-standalone-tmpfiles")
foreach(script conffiles postinst prerm postrm)
  list(APPEND CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA ${CMAKE_SOURCE_DIR}/deploy/package/${script})
endforeach()
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
include(CPack)

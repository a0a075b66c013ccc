# What `cmake --install` copies: headers, library, package config, program, bindings.
include(CMakePackageConfigHelpers)

if(FRETWORK_BUNDLE)
  set(LIBDIR lib) # where the Python package looks
else()
  set(LIBDIR ${CMAKE_INSTALL_LIBDIR})
  # A wheel holds no symbolic links and would carry a versioned library three times.
  set_target_properties(fretwork PROPERTIES VERSION ${PROJECT_VERSION}
                                            SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
endif()
set(PACKAGE_DIR ${LIBDIR}/cmake/fretwork)

install(TARGETS fretwork EXPORT fretworkTargets LIBRARY DESTINATION ${LIBDIR})
install(DIRECTORY include/fretwork DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT fretworkTargets NAMESPACE fretwork:: DESTINATION ${PACKAGE_DIR})
# So that find_package also works on the build folder.
export(EXPORT fretworkTargets NAMESPACE fretwork:: FILE ${PROJECT_BINARY_DIR}/fretworkTargets.cmake)
configure_package_config_file(cmake/fretworkConfig.cmake.in ${PROJECT_BINARY_DIR}/fretworkConfig.cmake
                              INSTALL_DESTINATION ${PACKAGE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fretworkConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fretworkConfig.cmake ${PROJECT_BINARY_DIR}/fretworkConfigVersion.cmake
        DESTINATION ${PACKAGE_DIR})

foreach(BINDING fretwork_torch fretwork_jax)
  if(TARGET ${BINDING})
    install(TARGETS ${BINDING} LIBRARY DESTINATION ${LIBDIR})
  endif()
endforeach()

if(TARGET fretwork_program)
  file(RELATIVE_PATH TO_LIBRARY /${CMAKE_INSTALL_BINDIR} /${LIBDIR})
  set_target_properties(fretwork_program PROPERTIES INSTALL_RPATH "$ORIGIN/${TO_LIBRARY}")
  install(TARGETS fretwork_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  if(DEFINED SKBUILD_SCRIPTS_DIR)
    # The program needs its library at a fixed place, and a wheel's scripts are anywhere.
    install(PROGRAMS tools/fretwork/launch.py DESTINATION ${SKBUILD_SCRIPTS_DIR} RENAME fretwork)
  endif()
endif()

# The file behind a library's links goes in under the name that programs look for, its SONAME.
function(install_beside NAME SONAME)
  find_library(BUNDLED_${NAME} NAMES ${SONAME} REQUIRED)
  file(REAL_PATH ${BUNDLED_${NAME}} FILE)
  install(PROGRAMS ${FILE} DESTINATION ${LIBDIR} RENAME ${SONAME})
endfunction()

if(FRETWORK_BUNDLE)
  install_beside(hwy libhwy.so.1)
  if(TARGET fretwork_program)
    install_beside(tbb libtbb.so.12)
  endif()
  # The notices of what is inside, as Debian has them.
  foreach(PACKAGE libhwy-dev libtbb-dev libxxhash-dev libeigen3-dev nlohmann-json3-dev libfmt-dev libcli11-dev libpng-dev)
    install(FILES /usr/share/doc/${PACKAGE}/copyright DESTINATION licenses RENAME ${PACKAGE}.txt OPTIONAL)
  endforeach()
endif()

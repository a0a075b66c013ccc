# fretwork_python_package(NAME FILE RESULT): the folder of a Python package that holds FILE. An isolated build cannot
# import what the user has installed, but it runs the same interpreter, which knows where packages lie.
function(fretwork_python_package NAME FILE RESULT)
  find_package(Python REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "
import pathlib, sys, sysconfig
folders = [pathlib.Path(p) / '${NAME}' for p in [*sys.path, sysconfig.get_paths()['purelib'], sysconfig.get_paths()['platlib']]]
print(next((str(f) for f in folders if (f / '${FILE}').exists()), ''))"
    OUTPUT_VARIABLE FOUND
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(NOT FOUND)
    message(FATAL_ERROR "${NAME}/${FILE} is not there for ${Python_EXECUTABLE}: pip install ${NAME}")
  endif()
  set(${RESULT} ${FOUND} PARENT_SCOPE)
endfunction()

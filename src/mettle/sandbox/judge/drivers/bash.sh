# Calls one function of a solution: `bash driver.sh solution.sh FUNCTION ARGUMENT...`.
#
# What the function prints goes to descriptor 3, and behind it a point that says that the function has come back. As in
# `$(function)`, what it returns as a status does not count; `exit` does. Its twin is calls.py.
__mettle_source=$1
__mettle_call=("${@:2}")
set --
source "$__mettle_source"
declare -F -- "${__mettle_call[0]}" > /dev/null || { echo "the code defines no function ${__mettle_call[0]}" >&2; exit 1; }
"${__mettle_call[@]}" >&3 || :
printf . >&3
exit 0

#!/usr/bin/env bash
# Run a pip command with torch's own package index beside the ones that pip is configured with, if it can be reached.
#   pip_with_torch_index.sh INDEX PYTHON -m pip install ...
# INDEX "" adds none. The pins hold for it too; of two builds of a version pip prefers torch's: 2.13.0+cpu to 2.13.0.
set -euo pipefail
index=$1
shift
if [ -n "$index" ]; then
    # pip itself would try an index that does not answer six times, with pauses.
    if timeout 6 "$1" -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=4)' "${index%/}/torch/" 2>/dev/null; then
        set -- "$@" --extra-index-url "$index"
    else
        echo "$index can't be reached: torch comes from where pip is told to look, which may be a build for CUDA" >&2
    fi
fi
# Folders of a find-links setting that are not there are pip's warning, once a package.
exec "$@" 2> >(grep -v 'is ignored: it is neither' >&2)

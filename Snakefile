# The records of the book, results/*.json, as a workflow: one job an experiment. `make results` calls it.
#
#   snakemake -n -c2                     what would run
#   snakemake -c2                        make every record again that is stale or missing, two at a time
#   snakemake -c2 --config everything=1  make every record again
#
# Whether a record is stale is decided by the digest that it carries and not by the age of a file: in a fresh clone
# all files have one age. An interrupted run goes on where it stopped, since what was finished is fresh by then.

import sys

sys.path.insert(0, f"{workflow.basedir}/tools")

from refresh import planned


rule all:
    input:
        [f"_build/records/{name}-{digest}.made" for name, digest in planned(bool(config.get("everything"))).items()],


rule record:
    output:
        temp(touch("_build/records/{name}-{digest}.made")),
    threads: 1
    params:
        python=sys.executable,
    shell:
        "OMP_NUM_THREADS=1 {params.python} -m ceilings.experiments.{wildcards.name}"

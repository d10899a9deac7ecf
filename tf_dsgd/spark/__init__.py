"""On Spark: `Distributor`, `partitions` and `DeepDist`. Needs the extra `tf_dsgd[spark]`.

`import tf_dsgd` does not import this, nor pyspark.
"""

from tf_dsgd._requirements import MissingRequirementError, installed

__all__ = ["DeepDist", "Distributor", "partitions"]

for _name in ("pyspark", "pyarrow"):
    if not installed(_name):
        raise MissingRequirementError(
            f'tf_dsgd.spark: {_name} is not installed. Run: pip install "tf_dsgd[spark]"'
        )

from tf_dsgd.spark.deepdist import DeepDist
from tf_dsgd.spark.distributor import Distributor
from tf_dsgd.spark.partitions import partitions

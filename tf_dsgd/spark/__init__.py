"""On Spark: `Distributor`, `partitions` and `DeepDist`. Needs the extra `tf_dsgd[spark]`.

`import tf_dsgd` does not import this, nor pyspark.
"""

from tf_dsgd import _requirements

__all__ = ["DeepDist", "Distributor", "partitions"]

if not (_requirements.installed("pyspark") and _requirements.installed("pyarrow")):
    raise _requirements.MissingRequirementError(
        'tf_dsgd.spark: pyspark or pyarrow is not installed. Run: pip install "tf_dsgd[spark]"'
    )

from tf_dsgd.spark.deepdist import DeepDist
from tf_dsgd.spark.distributor import Distributor
from tf_dsgd.spark.partitions import partitions

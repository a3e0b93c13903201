// Parts of the JSON reports of trainings.
#pragma once

#include <string>

#include "training/training.h"

namespace thimble {

std::string json_number(double);  // null if it is not finite
// {"trying": ..., "reading": ..., "labels": ..., "fitting": ..., "checking": ...}
std::string json_of(const TrainingSeconds&);

}  // namespace thimble

// Parts of the JSON that trainings report.
#pragma once

#include <string>

#include "training/training.h"

namespace thimble {

std::string json_number(double);
// {"trying": ..., "reading": ..., "labels": ..., "fitting": ..., "checking": ...}
std::string json_of(const TrainingSeconds&);

}  // namespace thimble

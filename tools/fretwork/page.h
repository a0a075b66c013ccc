// A page that shows rows: plots and a table, the machine and the versions. One file of HTML, no scripts.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace fretwork::cli {

using Json = nlohmann::ordered_json;

/// A mark for each row: the number in `field`, where there is one.
struct Series {
  std::string field, name;
};

/// A line for each row, with marks on one axis. The first series is the one that the others are set against.
struct Plot {
  std::string title;
  std::vector<std::string> labels;  ///< fields that name a row; those that are the same in every row are left out
  std::vector<Series> series;
  std::string unit = "ms";
  bool from_zero = false;  ///< a linear axis, in place of a logarithmic one
  std::string note = {};   ///< what the series mean
};

struct Page {
  std::string title;
  std::string summary = {};  ///< a sentence below the title
  Json facts = Json::object();
  std::vector<Plot> plots = {};
  Json rows = Json::array();  ///< objects, as in the JSON of the same run
};

std::string html_of(const Page& page);

}  // namespace fretwork::cli

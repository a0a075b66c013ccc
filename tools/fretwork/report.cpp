// `fretwork report`: what fw.sparsify did to a model, from its report's JSON, as a page.
#include <fmt/core.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>

#include "commands.h"
#include "fretwork/error.h"
#include "page.h"

namespace fretwork::cli {
namespace {

struct ReportOptions {
  std::string file, html;
};

/// Whether every row has what a row of sparsify's has.
bool is_model_report(const Json& report) {
  if (!report.is_object() || !report.contains("rows") || !report["rows"].is_array()) {
    return false;
  }
  return std::ranges::all_of(report["rows"], [](const Json& row) {
    return row.is_object() && row.contains("name") && row["name"].is_string() && row.contains("kind") &&
           row["kind"].is_string() && row.contains("parameters_before") &&
           row["parameters_before"].is_number_integer() && row.contains("parameters_after") &&
           row["parameters_after"].is_number_integer() && row.contains("error");
  });
}

Json read_model_report(const std::string& name) {
  std::ifstream file(name);
  if (file && std::filesystem::is_directory(name)) {  // which opens, but has nothing to read
    file.setstate(std::ios::failbit);
    errno = EISDIR;
  }
  if (!file) {
    throw Error(fmt::format("report: {}: cannot be read: {}", name, std::strerror(errno)));
  }
  Json report = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (report.is_discarded() || !is_model_report(report)) {
    throw Error(fmt::format("report: {}: expected the JSON of fw.sparsify's report, got something else", name));
  }
  return report;
}

Page page_of(const Json& report) {
  std::int64_t before = 0, after = 0;
  std::set<std::string> kinds;
  for (const Json& row : report["rows"]) {
    before += row["parameters_before"].get<std::int64_t>();
    after += row["parameters_after"].get<std::int64_t>();
    kinds.insert(row["kind"].get<std::string>());
  }
  std::string of;
  for (const std::string& kind : kinds) {
    of += (of.empty() ? "" : ", ") + kind;
  }
  Page page;
  page.title = "A model after fw.sparsify";
  page.summary = fmt::format("{} layers keep {:.1f} % of their parameters.", report["rows"].size(),
                             before > 0 ? 100 * static_cast<double>(after) / static_cast<double>(before) : 100.0);
  page.facts = {{"parameters before", before}, {"parameters after", after}, {"structures", of}};
  page.facts["fretwork"] = FRETWORK_VERSION;
  page.plots = {{.title = "Size of each layer",
                 .labels = {"name", "kind"},
                 .series = {{"parameters_after", "after"}, {"parameters_before", "before"}},
                 .unit = "parameters"},
                {.title = "What each layer lost",
                 .labels = {"name", "kind"},
                 .series = {{"error", "of the weight"}, {"output_error", "of the output, on the calibration's inputs"}},
                 .unit = "relative error",
                 .from_zero = true}};
  page.rows = report["rows"];
  return page;
}

void write_report(const ReportOptions& options) {
  const std::string page = html_of(page_of(read_model_report(options.file)));
  const std::string stem =
      options.file.ends_with(".json") ? options.file.substr(0, options.file.size() - 5) : options.file;
  const std::string name = options.html.empty() ? stem + ".html" : options.html;
  std::ofstream file(name);
  file << page;
  file.flush();
  if (!file) {
    throw Error(fmt::format("report: {}: cannot be written: {}", name, std::strerror(errno)));
  }
  fmt::print("wrote {}\n", name);
}

}  // namespace

void add_report(CLI::App& app) {
  const auto options = std::make_shared<ReportOptions>();
  CLI::App* const command = app.add_subcommand("report", "What fw.sparsify did to a model, as a page");
  command->add_option("FILE", options->file, "The JSON of its report")->required();
  command->add_option("--html", options->html, "The page (FILE with .html)");
  command->footer(
      "In Python: open(\"model.json\", \"w\").write(fw.sparsify(model, plan).to_json())\n"
      "Example:\n"
      "  fretwork report model.json --html model.html");
  command->callback([options] { write_report(*options); });
}

}  // namespace fretwork::cli

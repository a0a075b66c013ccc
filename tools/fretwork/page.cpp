// Marks are placed in percent, so that a plot is as wide as the window while its text keeps its size.
#include "page.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>

namespace fretwork::cli {
namespace {

constexpr const char* kHead = R"html(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
)html";

constexpr const char* kStyle = R"css(<style>
:root { --ink: #1c2330; --soft: #5b6575; --line: #d8dde5; --back: #fff; --c0: #0b62c4; --c1: #c4501b; --c2: #4b7f2a;
  --c3: #7d4bb5; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa5b5; --line: #39424f; --back: #14181f;
  --c0: #6db1ff; --c1: #ff9d6b; --c2: #93cf6c; --c3: #c59bf5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 72rem; color: var(--ink); background: var(--back);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .5rem; overflow-wrap: anywhere; }
.note { color: var(--soft); font-size: 13px; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .5rem 0; max-width: 60rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 1rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; color: var(--soft); font-size: 13px; }
.legend svg { width: 14px; height: 14px; vertical-align: -2px; margin-right: .35rem; }
.plot { margin: .75rem 0; font-size: 13px; }
.row, .axis { display: grid; grid-template-columns: minmax(8rem, 22rem) 1fr 5.5rem; gap: 0 .75rem; align-items: center; }
.row:hover { background: color-mix(in srgb, var(--line) 35%, transparent); }
.label { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.value { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.row svg { width: 100%; height: 22px; display: block; } .axis svg { width: 100%; height: 18px; display: block; }
.axis { color: var(--soft); } .axis text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--line); } .s0 { fill: var(--c0); } .s1 { fill: var(--c1); } .s2 { fill: var(--c2); }
.s3 { fill: var(--c3); }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem .2rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } .text { text-align: left; }
@media (max-width: 640px) { .row { grid-template-columns: 1fr max-content; padding: .2rem 0; } .axis { display: block; }
  .row svg { grid-row: 2; grid-column: 1 / 3; } .axis .label, .axis .value { display: none; } }
</style>
)css";

std::string escaped(const std::string& text) {
  std::string out;
  for (const char letter : text) {
    switch (letter) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += letter;
    }
  }
  return out;
}

std::string spaced(std::string name) {
  std::ranges::replace(name, '_', ' ');
  return name;
}

/// Four significant digits, and thousands apart.
std::string number_text(double value) {
  if (std::abs(value) < 10000 && value != std::floor(value)) {
    return fmt::format("{:.4g}", value);
  }
  std::string digits = fmt::format("{:.0f}", value);
  for (auto at = static_cast<std::ptrdiff_t>(digits.size()) - 3; at > (value < 0 ? 1 : 0); at -= 3) {
    digits.insert(static_cast<std::size_t>(at), ",");
  }
  return digits;
}

/// How a field stands in a label or a cell. Long lists, such as every round, are not for either.
std::optional<std::string> cell_text(const Json& value) {
  if (value.is_string()) {
    return value.get<std::string>();
  }
  if (value.is_boolean()) {
    return value.get<bool>() ? "yes" : "no";
  }
  if (value.is_number()) {
    return number_text(value.get<double>());
  }
  if (value.is_null()) {
    return "–";
  }
  constexpr std::size_t kMost = 8;
  const bool plain = std::ranges::all_of(value, [](const Json& part) { return part.is_number_integer(); });
  if (!value.is_array() || !plain || value.size() > kMost) {
    return std::nullopt;
  }
  std::string list;
  for (const Json& part : value) {
    list += (list.empty() ? "" : ", ") + part.dump();
  }
  return "(" + list + ")";
}

/// A logarithmic axis has no place for zero.
std::optional<double> mark_of(const Plot& plot, const Json& row, const Series& series) {
  const auto found = row.find(series.field);
  if (found == row.end() || !found->is_number() || found->get<double>() < 0 ||
      (!plot.from_zero && found->get<double>() == 0)) {
    return std::nullopt;
  }
  return found->get<double>();
}

/// Places on the axis of a plot, in percent of its width.
class Axis {
 public:
  Axis(const Plot& plot, const Json& rows) : from_zero_(plot.from_zero) {
    for (const Json& row : rows) {
      for (const Series& series : plot.series) {
        if (const auto value = mark_of(plot, row, series)) {
          low_ = std::min(low_, *value);
          high_ = std::max(high_, *value);
        }
      }
    }
    low_ = low_ > high_ ? 1 : low_;
    high_ = std::max(high_, low_ * 1.5);
    high_ = high_ > 0 ? high_ : 1;
  }

  double place(double value) const {
    return 3 + 94 * (from_zero_ ? value / high_ : std::log(value / low_) / std::log(high_ / low_));
  }

  std::vector<double> ticks() const { return from_zero_ ? even_ticks() : decade_ticks(); }

 private:
  /// About five from zero on.
  std::vector<double> even_ticks() const {
    double step = std::pow(10, std::floor(std::log10(high_)));
    while (high_ / step < 4) {
      step /= 2;
    }
    std::vector<double> found;
    for (int n = 0; n * step <= high_ * (1 + 1e-9); ++n) {
      found.push_back(n * step);
    }
    return found;
  }

  /// 1, 2 and 5 of every decade where they are few, else 1. The ends where there is hardly any.
  std::vector<double> decade_ticks() const {
    const double decades = std::log10(high_ / low_);
    std::vector<double> found;
    for (double decade = std::pow(10, std::floor(std::log10(low_))); decade <= high_; decade *= 10) {
      for (const double step : {1.0, 2.0, 5.0}) {
        const double value = step * decade;
        if (value >= low_ && value <= high_ && (step == 1.0 || decades < 2.5)) {
          found.push_back(value);
        }
      }
    }
    return found.size() < 2 ? std::vector{low_, high_} : found;
  }

  bool from_zero_;
  double low_ = std::numeric_limits<double>::max(), high_ = 0;
};

/// A disc for the first series, then a square, a bar, a triangle: colours are not all that tells them apart.
std::string mark_svg(std::size_t series, const std::string& x, int y) {
  constexpr std::array kShapes = {R"(<circle r="5"/>)", R"(<rect x="-4" y="-4" width="8" height="8"/>)",
                                  R"(<rect x="-1.5" y="-8" width="3" height="16"/>)",
                                  R"(<path d="M0 -6 5.5 4 -5.5 4z"/>)"};
  const std::size_t shape = series % kShapes.size();
  return fmt::format(R"(<svg x="{}" y="{}" overflow="visible"><g class="s{}">{}</g></svg>)", x, y, shape,
                     kShapes[shape]);
}

/// "dsd · block 32 · density 0.1".
std::string label_of(const Json& row, const std::vector<std::string>& fields) {
  std::string label;
  for (const std::string& field : fields) {
    const auto found = row.find(field);
    const auto text = found == row.end() || found->is_null() ? std::nullopt : cell_text(*found);
    if (text) {
      label += (label.empty() ? "" : " · ") + (found->is_number() ? field + " " : std::string()) + *text;
    }
  }
  return label;
}

/// Those that tell rows apart; all where none does.
std::vector<std::string> telling_fields(const std::vector<std::string>& fields, const Json& rows) {
  std::vector<std::string> found;
  for (const std::string& field : fields) {
    const auto differs = [&](const Json& row) { return row.value(field, Json()) != rows[0].value(field, Json()); };
    if (std::ranges::any_of(rows, differs)) {
      found.push_back(field);
    }
  }
  return found.empty() ? fields : found;
}

std::string grid_svg(const Axis& axis) {
  std::string lines;
  for (const double tick : axis.ticks()) {
    const double x = axis.place(tick);
    lines += fmt::format(R"(<line class="grid" x1="{0:.2f}%" x2="{0:.2f}%" y1="0" y2="22"/>)", x);
  }
  return lines;
}

std::string axis_html(const Axis& axis, const std::string& unit) {
  std::string labels;
  for (const double tick : axis.ticks()) {
    const double x = axis.place(tick);
    labels += fmt::format(R"(<text x="{:.2f}%" y="13" text-anchor="{}">{}</text>)", x,
                          x < 6    ? "start"
                          : x > 94 ? "end"
                                   : "middle",
                          number_text(tick));
  }
  return fmt::format(
      "<div class=\"axis\"><span class=\"label\"></span><svg role=\"presentation\">{}</svg>"
      "<span class=\"value\">{}</span></div>\n",
      labels, escaped(unit));
}

std::string row_html(const Plot& plot, const Json& row, const std::string& label, const Axis& axis,
                     const std::string& grid) {
  std::string marks, told;
  for (std::size_t n = plot.series.size(); n-- > 0;) {  // the first is drawn over the others
    if (const auto value = mark_of(plot, row, plot.series[n])) {
      marks += mark_svg(n, fmt::format("{:.2f}%", axis.place(*value)), 11);
      told = fmt::format("{} {} {}{}", plot.series[n].name, number_text(*value), plot.unit,
                         told.empty() ? "" : "; " + told);
    }
  }
  const auto first = mark_of(plot, row, plot.series.front());
  return fmt::format(
      "<div class=\"row\"><span class=\"label\" title=\"{0}\">{0}</span>"
      "<svg role=\"img\" aria-label=\"{0}: {1}\"><title>{0}: {1}</title>{2}{3}</svg>"
      "<span class=\"value\">{4}</span></div>\n",
      escaped(label), escaped(told), grid, marks,
      first ? escaped(number_text(*first) + (plot.unit == "ms" ? " ms" : "")) : "–");
}

std::string plot_html(const Plot& plot, const Json& rows) {
  const auto used = [&](const Series& series) {
    return std::ranges::any_of(rows, [&](const Json& row) { return mark_of(plot, row, series).has_value(); });
  };
  std::string text = fmt::format("<h2>{}, {}</h2>\n<div class=\"legend\">", escaped(plot.title), escaped(plot.unit));
  for (std::size_t n = 0; n < plot.series.size(); ++n) {
    if (used(plot.series[n])) {
      text += fmt::format("<span><svg role=\"presentation\">{}</svg>{}</span>", mark_svg(n, "7", 7),
                          escaped(plot.series[n].name));
    }
  }
  const Axis axis(plot, rows);
  const std::string grid = grid_svg(axis);
  const auto labels = telling_fields(plot.labels, rows);
  text += "</div>\n<div class=\"plot\">\n" + axis_html(axis, plot.unit);
  for (const Json& row : rows) {
    text += row_html(plot, row, label_of(row, labels), axis, grid);
  }
  return text + "</div>\n" + (plot.note.empty() ? "" : fmt::format("<p class=\"note\">{}</p>\n", escaped(plot.note)));
}

std::string table_html(const Json& rows) {
  std::vector<std::string> fields;
  for (const Json& row : rows) {
    for (const auto& [field, value] : row.items()) {
      if (cell_text(value) && std::ranges::find(fields, field) == fields.end()) {
        fields.push_back(field);
      }
    }
  }
  const auto is_text = [&](const std::string& field) {
    return std::ranges::any_of(rows, [&](const Json& row) { return row.value(field, Json()).is_string(); });
  };
  std::string head, body;
  for (const std::string& field : fields) {
    head += fmt::format("<th{}>{}</th>", is_text(field) ? " class=\"text\"" : "", escaped(field));
  }
  for (const Json& row : rows) {
    body += "<tr>";
    for (const std::string& field : fields) {
      const auto found = row.find(field);
      const auto text = found == row.end() ? std::nullopt : cell_text(*found);
      body += fmt::format("<td{}>{}</td>", is_text(field) ? " class=\"text\"" : "", escaped(text.value_or("")));
    }
    body += "</tr>\n";
  }
  return fmt::format(
      "<h2>Rows</h2>\n<div class=\"table\" tabindex=\"0\"><table>\n<thead><tr>{}</tr></thead>\n<tbody>\n"
      "{}</tbody>\n</table></div>\n",
      head, body);
}

}  // namespace

std::string html_of(const Page& page) {
  const std::string title = escaped(page.title);
  std::string text = kHead + fmt::format("<title>{}</title>\n", title) + kStyle;
  text += fmt::format("</head>\n<body>\n<h1>{}</h1>\n", title);
  text += page.summary.empty() ? "" : fmt::format("<p>{}</p>\n", escaped(page.summary));
  text += "<dl>\n";
  for (const auto& [name, value] : page.facts.items()) {
    if (value == "") {
      continue;
    }
    text += fmt::format("<dt>{}</dt><dd>{}</dd>\n", escaped(spaced(name)),
                        escaped(cell_text(value).value_or(value.dump())));
  }
  text += "</dl>\n";
  if (!page.rows.empty()) {
    for (const Plot& plot : page.plots) {
      text += plot_html(plot, page.rows);
    }
    text += table_html(page.rows);
  }
  return text + "</body>\n</html>\n";
}

}  // namespace fretwork::cli

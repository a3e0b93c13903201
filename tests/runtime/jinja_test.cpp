// Tests that templates run as in Jinja2, and that hostile ones are stopped.
#include <gtest/gtest.h>
#ifndef _WIN32
#include <pthread.h>
#endif

#include <cstdio>
#include <fstream>
#include <iterator>

#include "templates/jinja/template.h"
#include "templates/jinja/text.h"
#include "tests/support/chat_cases.h"
#include "tests/support/counting_allocator.h"
#include "tests/support/data.h"

namespace thimble {
namespace {

std::string repeated(const std::string& text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += text;
  return all;
}

constexpr uint64_t kQuarterBytes = 32 << 20;

// Why a template is refused, by the parser or when it runs.
// With a quarter of the limits that models' templates have, so that a sanitizer's run ends soon, too.
Status refusal(const std::string& source, const std::string& variables = "{}") {
  const jinja::Limits quarter{4'000'000, kQuarterBytes, 8 << 20};
  const auto text = render(source, variables, quarter);
  EXPECT_FALSE(text.ok()) << source.substr(0, 200) << "\ngives " << (text.ok() ? text->substr(0, 200) : "");
  return text.ok() ? Status() : text.status();
}

TEST(Jinja, WritesWhatJinja2WritesForEveryConstruct) {
  std::ifstream file(project_file("tests/reference/chat_templates.json"), std::ios::binary);
  ASSERT_TRUE(file);
  const CaseCounts counts =
      expect_as_jinja({std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()});
  EXPECT_GT(counts.rendered, 100u);
  EXPECT_GT(counts.refused, 40u);
}

#ifndef _WIN32
TEST(Jinja, WritesPublishedTemplatesAsJinja2Does) {
  const std::string folder = shared_file("data/templates");
  THIMBLE_NEEDS(folder);
  if (std::system("python3 -c 'import jinja2' 2>/dev/null") != 0) {
    if (std::getenv("THIMBLE_REQUIRE_DATA")) FAIL() << "python3-jinja2 is missing; see scripts/setup ci";
    GTEST_SKIP() << "python3-jinja2 is missing";
  }
  const std::string command =
      "python3 " + project_file("tests/reference/chat_templates.py") + " published " + folder;
  FILE* pipe = popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string json;
  char block[1 << 16];
  for (size_t n; (n = std::fread(block, 1, sizeof block, pipe)) > 0;) json.append(block, n);
  ASSERT_EQ(pclose(pipe), 0);
  const CaseCounts counts = expect_as_jinja(json);
  EXPECT_EQ(counts.templates, 65u);
  EXPECT_GT(counts.rendered, 7000u);
}
#endif

TEST(Jinja, SaysWhatItRefusesAndInWhichLine) {
  const std::pair<const char*, const char*> refused[] = {
      {"a\n{% include 'x' %}", "line 2: {% include %} is not supported: there are no other templates"},
      {"{% extends 'x' %}", "{% extends %} is not supported"},
      {"{% import 'x' as y %}", "{% import %} is not supported"},
      {"{% from 'x' import y %}", "{% from %} is not supported"},
      {"{% block x %}{% endblock %}", "{% block %} is not supported"},
      {"{% do x %}", "line 1: the statement 'do' is not known here"},
      {"a\n\n{{ x | nope }}", "line 3: the filter 'nope' is not known here"},
      {"{{ x is nope }}", "line 1: the test 'nope' is not known here"},
      {"{% raw %}\n{% endra %}", "line 1: the statement that begins here has no {% endraw %}"},
      {"{% call f %}{% endcall %}", "{% call %} needs a call"},
      {"{{ f(**a, *b) }}", "'*' is not expected here"},
      {"{{ f(*a, b) }}", "'b' is not expected here"},
      {"{% with a %}{% endwith %}", "ends where more is expected"},
      {"{% for x in y recursive if z %}{% endfor %}", "'if' is not expected here"},
      {"{{ x", "has no end; write }}"},
      {"{% if x", "has no end; write %}"},
      {"{# x", "a comment has no end"},
      {"\n{{ 'abc }}", "line 2: a string has no end"},
      {"{{ '\\", "a string has no end"},
      {"{{ '\\N{DASH}' }}", "characters by name"},
      {"{{ '\\ud800' }}", "not a character"},
      {"{% if x %}\n\nabc", "line 1: the statement that begins here has no {% endif %}"},
      {"{% for x in y %}{% endif %}", "the statement 'endif' is not known here"},
      {"{{ (x }}", "closing bracket has no opening one"},
      {"{{ x ] }}", "closing bracket has no opening one"},
      {"{{ x y }}", "'y' is not expected here"},
      {"{{ }}", "ends where more is expected"},
      {"{{ ? }}", "a character is not allowed in a tag"},
      {"{{ 99999999999999999999 }}", "is too large"},
      {"{% break %}", "outside of a loop"},
      {"{% macro f(a=1, b) %}{% endmacro %}", "without a default"},
      {"{{ f(a=1, 2) }}", "'2' is not expected here"},
      {"{% set %}", "ends where more is expected"},
      {"{{ a[] }}", "ends where more is expected"},
      {"{{ a[1:2:3:4] }}", "ends where more is expected"},
  };
  for (const auto& [source, sentence] : refused) {
    const auto parsed = jinja::Template::parse(source);
    ASSERT_FALSE(parsed.ok()) << source;
    EXPECT_EQ(parsed.status().code(), Code::kUnsupported) << source;
    EXPECT_NE(parsed.status().message().find(sentence), std::string::npos) << source << "\n"
                                                                           << parsed.status().message();
  }
}

TEST(Jinja, SaysWhatFailsAndInWhichLine) {
  EXPECT_EQ(refusal("{% if true %}\n{{ 1|nope }}{% endif %}").message(),
            "the chat template, line 2: the filter 'nope' is not known here");
  EXPECT_EQ(refusal("{% if true %}{{ 1 is nope }}{% endif %}").message(),
            "the chat template, line 1: the test 'nope' is not known here");
  EXPECT_EQ(refusal("{{ nope(1) }}").message(), "the chat template, line 1: 'nope' is undefined");
  EXPECT_EQ(refusal("{{ 'a'.encode() }}").message(),
            "the chat template, line 1: a text has no method 'encode'");
  EXPECT_EQ(refusal("{{ [1].clear() }}").message(),
            "the chat template, line 1: 'clear' would change a list, which a template must not");
  const Status undefined = refusal("a\n{{ message.content }}");
  EXPECT_EQ(undefined.code(), Code::kInvalidArgument);
  EXPECT_EQ(undefined.message(), "the chat template, line 2: 'message' is undefined");
  EXPECT_EQ(refusal("{{ 'a' + 1 }}").message(),
            "the chat template, line 1: a text + an integer has no meaning");
  EXPECT_EQ(
      refusal("{% macro f() %}\n\n{{ raise_exception('Roles must alternate!') }}{% endmacro %}{{ f() }}")
          .message(),
      "the chat template refuses this: Roles must alternate!");
}

TEST(Jinja, ReadsNumbersAndPairsAsPythonDoes) {
  const std::pair<const char*, const char*> all[] = {
      {"{{ dict([('x', 1), ['y', 2]], z=3) }}", "{'x': 1, 'y': 2, 'z': 3}"},
      {"{{ dict(['ab']) }}", "{'a': 'b'}"},
      {"{{ namespace([('x', 1)]).x }}", "1"},
      {"{{ '\\r'|indent(2, true, true) }}|{{ 'a\\r\\n'|indent(1, false, true) }}|", "  |a\n |"},
      {"{{ '\u0130'.swapcase() }} {{ '\u0130'.casefold() }}", "i\u0307 i\u0307"},
      {"{{ 1e400 }} {{ -1e400 }} {{ 1e-400 }}", "inf -inf 0.0"},
      {"{{ '1e400'|float }} {{ '1e-400'|float }}", "inf 0.0"},
      {"{{ '1e-400'|from_json }} {{ '-1e400'|from_json }}", "0.0 -inf"},
      {"{{ '\u0661\u0662'|int }} {{ ' -\uff13_\u0967 '|int }} {{ '\u0661.\u0665'|float }}", "12 -31 1.5"},
      {"{{ '\u00b2'|int }} {{ '\u0661x'|int }} {{ '\u00bd'|float }} {{ 'nan'|int }}", "0 0 0.0 0"},
      {"{{ 5.5 % 0.1 }} {{ -7.5 % 2 }} {{ -7.5 // 2 }} {{ 1e17 % 3 }} {{ 7.5 // -2 }}",
       "0.0999999999999997 0.5 -4.0 1.0 -4.0"},
      {"{{ 9007199254740993 == 9007199254740992.0 }} {{ 9007199254740992.0 < 9007199254740993 }}",
       "False True"},
  };
  for (const auto& [source, expected] : all) {
    const auto text = render(source);
    ASSERT_TRUE(text.ok()) << source << "\n" << text.status().message();
    EXPECT_EQ(*text, expected) << source;
  }
  // Python raises an error, or gives a value for which there is no number here.
  for (const char* source :
       {"{{ dict([1]) }}", "{{ dict(['abc']) }}", "{{ dict(1) }}", "{{ namespace('ab') }}", "{{ 0 ** -1 }}",
        "{{ 0.0 ** -1 }}", "{{ (-8) ** 0.5 }}", "{{ 10.0 ** 400 }}", "{{ '99999999999999999999'|int }}",
        "{{ 1e30|int }}", "{{ '1e30'|int }}", "{{ 1e400|int }}"})
    EXPECT_NE(refusal(source).message(), "") << source;
}

// ---- hostile templates: each is stopped by a bound, soon ----

TEST(Jinja, StopsLoopsThatDoNotEnd) {
  EXPECT_NE(refusal("{% for i in range(10**9) %}{% endfor %}").message().find("range"), std::string::npos);
  for (const char* source :
       {"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for x in range(99999)|map('string') %}{% endfor %}{% endfor %}",
        "{% for x in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{% for x in range(99) recursive %}{{ loop(range(99)) }}{% endfor %}",
        "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}{% macro g() %}{% call f() %}{{ g() }}{% "
        "endcall %}{% "
        "endmacro %}{{ g() }}",
        "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{{ caller() }}{% endmacro %}{% call f() "
        "%}a{% endcall %}",
        "{% macro f() %}{{ f(*varargs, **kwargs) }}{% endmacro %}{{ f(1, a=2) }}",
        "{% for i in range(99999) %}{{ [1, 2, 3]|batch(1)|list }}{{ range(9999)|slice(9)|list }}{% endfor %}",
        "{% for i in range(99999) %}{{ range(9999)|map('string')|groupby(0)|length }}{% endfor %}",
        "{% set a = 'aB' * 99999 %}{% for i in range(99999) %}{{ a.swapcase()|title|wordcount }}{% endfor %}",
        "{% set a = 'a ' * 99999 %}{% for i in range(99999) %}{{ a.isupper() }}{{ a is lower }}{% endfor %}",
        "{% set a = 'a' * 99999 %}{% for i in range(99999) %}{{ a.find('b', 5) }}{{ a.count('b', 1, 9) }}{% "
        "endfor %}",
        "{% set a = '%%' * 99999 %}{% for i in range(99999) %}{% set b = a % () %}{% endfor %}",
        "{% set a = '{{' * 99999 %}{% for i in range(99999) %}{% set b = a.format() %}{% endfor %}",
        "{% set a = range(9999)|map('string') %}{% for i in range(99999) %}{{ "
        "range(9999)|map('string')|first }}{% endfor %}",
        "{% for i in range(99999) %}{{ range(99999)|sum }}{% endfor %}",
        "{% for i in range(99999) %}{{ 5 in range(99999)|reverse }}{% endfor %}",
        "{% macro f(n) %}{% for i in range(9999) %}{{ f(n) }}{% endfor %}{% endmacro %}{{ f(1) }}",
        "{% set a = 'a' * 9999999 %}{% for i in range(99999) %}{{ a == a ~ '' }}{% endfor %}",
        "{% set a = 'a' * 999999 %}{% set b = 'a' * 99999 ~ 'b' %}{{ b in a }}{{ a.find(b) }}{{ a.split(b) "
        "}}"}) {
    const Status status = refusal(source);
    EXPECT_EQ(status.code(), Code::kUnsupported) << source;
    EXPECT_TRUE(status.message().find("too many steps") != std::string::npos ||
                status.message().find("too many values") != std::string::npos ||
                status.message().find("too deeply") != std::string::npos)
        << status.message();
  }
}

TEST(Jinja, StopsWhatTakesTooMuchMemory) {
  for (const char* source :
       {"{{ 'a' * 10**12 }}",
        "{{ 'a' * 2**62 }}",
        "{{ [0] * 10**9 }}",
        "{{ [[0] * 99999] * 99999 }}",
        "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(99) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ '%99999999s' % 1 }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '%.999999999f' % 1 }}",
        "{{ '%.999999999d' % 1 }}",
        "{{ '%*s' % (999999999, 1) }}",
        "{{ '%999999999c' % 65 }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:0999999999,}'.format(1) }}",
        "{{ '{:.999999999f}'.format(1) }}",
        "{{ '{:>{}}'.format('a', 999999999) }}",
        "{{ '{:é^999999999}'.format('a') }}",
        "{{ '%99999999s'|format(1) }}",
        "{{ 'a'|center(10**9) }}",
        "{{ 'a'.center(10**9) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a'.rjust(10**9, 'é') }}",
        "{{ 'a'.zfill(10**9) }}",
        "{{ 'a'.zfill(2**62) }}",
        "{{ 'a'.center(2**62, 'é') }}",
        "{{ '\t'.expandtabs(10**9) }}",
        "{{ [1]|batch(10**9, 0)|list }}",
        "{{ [1]|slice(10**9)|list }}",
        "{{ 'a'|indent('x' * 99999999) }}",
        "{{ ('a' * 9999)|replace('a', 'b' * 9999) }}",
        "{{ ('a' * 9999)|replace('', 'b' * 9999) }}",
        "{{ ('<' * 9999999)|e|e|e }}",
        "{{ ('é' * 9999999)|urlencode }}",
        "{{ 'a'.join(['x' * 999999] * 9999) }}",
        "{% macro f() %}{% endmacro %}{{ f(*range(99999)|list * 99) }}",
        "{{ ((('%s' * 999) % (('%s' * 999,) * 999)) % (('a' * 99,) * 998001)) }}",
        "{% set ns = namespace(d={}) %}{% for i in range(99999) %}{% set ns.d = dict(ns.d, **{i|string: i}) "
        "%}{% endfor %}",
        "{% for i in range(99999) %}{% set a = 'x' * 99999 %}{% endfor %}",
        "{% set a = ['x' * 999999] * 9999 %}{{ a|join }}",
        "{% set a = ['x' * 999999] * 9999 %}{{ a }}",
        "{% set a = ['x' * 999999] * 9999 %}{{ a|tojson }}",
        "{{ ('a' * 999999).replace('', 'b' * 999) }}",
        "{{ ('\\n' * 999999)|indent(999, blank=true) }}",
        "{{ [[[[1]]]]|tojson(indent='x' * 99999999) }}",
        "{% for i in range(9999) %}{% macro f() %}{% endmacro %}{% set a = range(999)|list %}{% endfor %}",
        "{% set a = 'a' * 15000000 %}{{ a.expandtabs() }}{{ a.expandtabs() }}",
        "{{ ('\\n' * 999999).splitlines() }}",
        "{{ ('\\n' * 999999).splitlines(true) }}",
        "{{ ('a ' * 999999).split() }}",
        "{{ ('a ' * 999999).rsplit() }}",
        "{{ ('a,' * 999999).split(',') }}",
        "{{ ('a,' * 999999).rsplit(',') }}",
        "{{ ('a' * 999999)|list }}",
        "{{ ('a' * 15000000)|reverse }}",
        "{{ ('a' * 15000000)[::-1] }}",
        "{{ ['\\x00' * 9999999] }}",
        "{{ ('%c' * 9999999)|strftime_now if false else strftime_now('%c' * 999999) }}",
        "{{ [0] * 999999 }}",
        "{{ range(99999)|map('default', *range(99999))|list }}",
        "{% set ns = namespace(t='x' * 9999999) %}{% for i in range(99) %}{{ ns.t }}{% endfor %}"}) {
    const int64_t before = g_allocations.live_bytes;
    g_allocations.peak_bytes = before;
    const Status status = refusal(source);
    EXPECT_EQ(status.code(), Code::kUnsupported) << source << "\n" << status.message();
    // The peak of allocated memory, as the allocator counts it, which is 0 under a sanitizer. The extra MiB
    // is for the template's tree and the rounding of malloc.
    EXPECT_LE(g_allocations.peak_bytes - before, int64_t{kQuarterBytes} + (1 << 20)) << source;
  }
}

TEST(Jinja, RefusesASourceWhoseTreeWouldTakeTooMuchMemory) {
  const int64_t before = g_allocations.live_bytes;
  g_allocations.peak_bytes = before;
  const auto parsed = jinja::Template::parse("{{ " + repeated("1,", 520'000) + "1 }}");
  EXPECT_FALSE(parsed.ok());
  EXPECT_TRUE(jinja::Template::parse("{{ " + repeated("1,", 130'000) + "1 }}").ok());
  EXPECT_LE(g_allocations.peak_bytes - before, int64_t(jinja::Limits().bytes));
}

TEST(Jinja, StopsWhatIsNestedTooDeeply) {
  for (const std::string& source :
       {"{{ " + repeated("(", 100'000) + repeated(")", 100'000) + " }}",
        "{{ " + repeated("[", 100'000) + repeated("]", 100'000) + " }}",
        "{{ " + repeated("not ", 100'000) + "x }}",
        "{{ " + repeated("-", 100'000) + "1 }}",
        "{{ x" + repeated(".a", 100'000) + " }}",
        "{{ x" + repeated("|trim", 100'000) + " }}",
        "{{ 1" + repeated(" + 1", 100'000) + " }}",
        "{{ x" + repeated("[0]", 100'000) + " }}",
        "{{ 1" + repeated(" if x else 1", 100'000) + " }}",
        "{{ 1" + repeated(" if x", 100'000) + " }}",
        "{{ x" + repeated(" is defined", 100'000) + " }}",
        "{{ " + repeated("f(", 100'000) + repeated(")", 100'000) + " }}",
        "{{ " + repeated("f(*", 100'000) + "x" + repeated(")", 100'000) + " }}",
        "{{ " + repeated("f(**", 100'000) + "x" + repeated(")", 100'000) + " }}",
        "{{ f" + repeated("()", 100'000) + " }}",
        "{% for " + repeated("(", 100'000) + "a in b %}{% endfor %}",
        repeated("{% call f() %}", 30'000),
        repeated("{% with %}", 30'000),
        repeated("{% macro f() %}", 30'000),
        "{% print 1" + repeated(", 1", 100'000) + " %}",
        repeated("{% if x %}", 50'000) + repeated("{% endif %}", 50'000),
        repeated("{% for x in y %}", 30'000),
        repeated("{% set x %}", 50'000),
        "{{ " + repeated("{'a':", 100'000) + "1" + repeated("}", 100'000) + " }}"})
    EXPECT_EQ(refusal(source).code(), Code::kUnsupported) << source.substr(0, 60);
  for (const char* source :
       {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% macro f() %}{% call f() %}{% endcall %}{{ caller() }}{% endmacro %}{{ f() }}",
        "{% set ns = namespace(l=[]) %}{% for i in range(999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ "
        "ns.l|tojson }}",
        "{% set ns = namespace(l=[], m=[]) %}{% for i in range(999) %}{% set ns.l = [ns.l] %}{% set ns.m = "
        "[ns.m] %}"
        "{% endfor %}{{ ns.l == ns.m }}",
        "{% set ns = namespace(l=[], m=[]) %}{% for i in range(999) %}{% set ns.l = [ns.l] %}{% set ns.m = "
        "[ns.m] %}"
        "{% endfor %}{{ ns.l < ns.m }}",
        "{% set ns = namespace(d={}) %}{% for i in range(999) %}{% set ns.d = {'a': ns.d} %}{% endfor %}{{ "
        "ns.d }}",
        "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l "
        "}}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(9999) %}{% set ns.l = [ns.l] %}{% endfor %}"
        "{% for x in ns.l|map(*(['map'] * 9999 + ['string'])) %}{% endfor %}"})
    EXPECT_EQ(refusal(source).code(), Code::kUnsupported) << source;
  EXPECT_EQ(refusal("{{ s|from_json }}", "{\"s\": \"" + repeated("[", 99'999) + "\"}").code(),
            Code::kUnsupported);
}

#ifndef _WIN32
// 512 KiB is the default stack of threads with musl and macOS. The compiler and the sanitizers decide how
// deep the recursion gets.
TEST(Jinja, RecursesWithinAStackOf512KiB) {
  const auto around = [](const char* open, const char* inside, const char* close, int levels) {
    return repeated(open, levels) + inside + repeated(close, levels);
  };
  std::vector<std::string> sources;
  for (const int levels : {10, 20, 40, 90}) {
    const auto in_macro = [&](const std::string& body) {
      sources.push_back("{% macro f(x) %}" + body + "{% endmacro %}{{ f(1) }}");
    };
    in_macro("{{ " + around("[", "f(x)", "]", levels) + " }}");
    in_macro("{{ " + around("f(", "x", ")", levels) + " }}");
    in_macro("{{ " + around("dict(a=", "f(x)", ")", levels) + " }}");
    in_macro("{{ " + around("x[:", "f(x)", "]", levels) + " }}");
    in_macro("{{ " + around("x|default(", "f(x)", ", true)", levels) + " }}");
    in_macro(around("{% for a in [1] %}", "{{ f(x) }}", "{% endfor %}", levels));
    in_macro(around("{% set y %}", "{{ f(x) }}", "{% endset %}", levels));
    in_macro(around("{% filter trim %}", "{{ f(x) }}", "{% endfilter %}", levels));
    in_macro(around("{% call f(x) %}", "{{ caller() }}", "{% endcall %}", levels));
    sources.push_back("{% for a in [1] recursive %}{{ " + around("[", "loop([1])", "]", levels) +
                      " }}{% endfor %}");
  }
  for (const char* use :
       {"l", "l|tojson", "l == ns.m", "l < ns.m", "l|tojson|from_json", "l|map('list')|list"})
    sources.push_back(
        "{% set ns = namespace(l=[], m=[]) %}{% for i in range(60) %}{% set ns.l = [ns.l] %}{% set ns.m = "
        "[ns.m] %}{% endfor %}{% macro f(n) %}{% if n %}{{ [[[f(n - 1)]]] }}{% else %}{{ ns." +
        std::string(use) + " }}{% endif %}{% endmacro %}{{ f(3) }}{{ f(9) }}{{ f(25) }}");
  sources.push_back(
      "{% set ns = namespace(l=[1]) %}{% for i in range(9999) %}{% set ns.l = [ns.l] %}{% endfor %}"
      "{{ ns.l|map(*(['map'] * 9999 + ['string']))|list }}");
  const auto run = [](void* all) -> void* {
    for (const std::string& source : *static_cast<std::vector<std::string>*>(all)) {
      const auto text = render(source);
      EXPECT_TRUE(text.ok() || text.status().code() == Code::kUnsupported) << text.status().message();
    }
    return nullptr;
  };
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, 512 << 10), 0);
  pthread_t thread;
  ASSERT_EQ(pthread_create(&thread, &attributes, run, &sources), 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
}
#endif

TEST(Jinja, SeesNothingButWhatItIsGiven) {
  for (const char* source :
       {"{{ ''.__class__ }}", "{{ messages.__init__ }}", "{{ range.__globals__ }}", "{{ self }}",
        "{{ cycler.x }}", "{{ [].__class__.__base__ }}", "{{ get_flashed_messages }}"}) {
    const auto text = render(source, R"({"messages": []})");
    EXPECT_TRUE(!text.ok() || text->empty()) << source << *text;
  }
}

TEST(Jinja, TakesAnyBytes) {
  const std::string bytes = "\xff\xc3 \xe2\x82 \xf0\x9f\x98";
  const auto text = render("{{ x|length }}{{ x[::-1] }}{{ x.strip() }}{{ x|upper }}{{ x|tojson }}{{ x }}",
                           "{\"x\": \"" + bytes + "\"}");
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_NE(text->find(bytes), std::string::npos);
  EXPECT_TRUE(render(bytes + "{{ '" + bytes + "' }}").ok());
  EXPECT_FALSE(render("{{ " + bytes + " }}").ok());
}

TEST(Jinja, WritesFloatsAsPythonDoes) {
  const std::pair<double, const char*> floats[] = {
      {0.1, "0.1"},     {1e16, "1e+16"}, {1e15, "1000000000000000.0"},
      {1e-4, "0.0001"}, {1e-5, "1e-05"}, {-2.5e-7, "-2.5e-07"},
      {123.0, "123.0"}, {0.0, "0.0"},    {1.5e300, "1.5e+300"}};
  for (const auto& [number, text] : floats) EXPECT_EQ(jinja::float_text(number), text);
}

}  // namespace
}  // namespace thimble

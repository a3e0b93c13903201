#include "training/facts.h"

#include <algorithm>

namespace thimble {
namespace {

constexpr const char* kNames[] = {
    "Alice",   "Benedict", "Clara",  "Daniel",  "Edith",   "Felix",   "Grace",    "Henry",   "Irene",
    "Jasper",  "Leo",      "Martha", "Nathan",  "Olive",   "Peter",   "Quentin",  "Rosa",    "Samuel",
    "Tessa",   "Ursula",   "Victor", "Wanda",   "Xavier",  "Yvonne",  "Zachary",  "Agnes",   "Bruno",
    "Cecilia", "Edgar",    "Flora",  "Gideon",  "Harriet", "Isaac",   "Judith",   "Kenneth", "Lydia",
    "Miles",   "Nora",     "Oscar",  "Phoebe",  "Ralph",   "Sylvia",  "Theodore", "Una",     "Vincent",
    "Arthur",  "Beatrice", "Conrad", "Delia",   "Ernest",  "Frances", "Gilbert",  "Helen",   "Ivan",
    "Lionel",  "Mabel",    "Norman", "Ophelia", "Percy",   "Ruth",    "Simon",    "Thelma",  "Walter",
    "Adela",   "Boris",    "Colin",  "Daphne",  "Elias",   "Gwen",    "Hugo",     "Ida",     "Jonas"};
constexpr const char* kObjects[] = {
    "umbrella", "lantern", "compass", "teapot", "violin",  "ladder", "telescope", "blanket", "hammer",
    "mirror",   "basket",  "candle",  "kettle", "trumpet", "globe",  "saddle",    "clock",   "inkwell",
    "whistle",  "anchor",  "scarf",   "drum",   "shovel",  "bucket", "necklace",  "diary",   "map",
    "helmet",   "pillow",  "flute",   "rope",   "statue",  "goblet", "chest",     "brush",   "wheel",
    "feather",  "bell",    "axe",     "carpet", "parcel",  "locket", "piano",     "jug",     "barrel"};
constexpr const char* kAdjectives[] = {
    "red",   "blue",   "green",    "silver",  "golden", "old",     "tiny",    "heavy",  "broken", "wooden",
    "brass", "black",  "white",    "striped", "rusty",  "purple",  "orange",  "velvet", "copper", "glass",
    "iron",  "yellow", "polished", "carved",  "grey",   "crooked", "painted", "marble", "leather"};
constexpr const char* kPlaces[] = {"attic",      "cellar", "garden",   "kitchen",    "stable",  "library",
                                   "tower",      "chapel", "bakery",   "harbour",    "mill",    "orchard",
                                   "pantry",     "barn",   "workshop", "greenhouse", "vault",   "tavern",
                                   "cottage",    "market", "station",  "theatre",    "museum",  "bridge",
                                   "well",       "forge",  "office",   "laundry",    "nursery", "ballroom",
                                   "lighthouse", "studio", "gallery",  "courtyard",  "balcony", "boathouse"};
constexpr const char* kCities[] = {
    "London",  "Paris",  "Vienna", "Lisbon",   "Dublin",  "Prague",  "Oslo",    "Cairo",   "Athens", "Madrid",
    "Geneva",  "Boston", "Naples", "Hamburg",  "Warsaw",  "Bergen",  "Seville", "Bristol", "Odessa", "Venice",
    "Leipzig", "Toledo", "Quebec", "Havana",   "Lima",    "Sydney",  "Kyoto",   "Tunis",   "Zurich", "Munich",
    "Glasgow", "Turin",  "Porto",  "Florence", "Antwerp", "Chester", "Genoa",   "York"};
constexpr const char* kDays[] = {"Monday", "Tuesday",  "Wednesday", "Thursday",
                                 "Friday", "Saturday", "Sunday"};
constexpr const char* kMonths[] = {"January", "February", "March",     "April",   "May",      "June",
                                   "July",    "August",   "September", "October", "November", "December"};
constexpr const char* kCargo[] = {"tin",    "silk", "coal", "salt",  "spices", "timber", "wool", "sugar",
                                  "cotton", "wine", "tea",  "grain", "marble", "rubber", "cocoa"};
constexpr const char* kTrades[] = {"baker",   "doctor", "painter",  "sailor",  "tailor",  "judge",   "miller",
                                   "teacher", "lawyer", "gardener", "printer", "butcher", "chemist", "clerk"};
constexpr const char* kEvents[] = {"fair",  "concert", "wedding", "race",
                                   "trial", "auction", "banquet", "parade"};
constexpr const char* kSyllables[] = {"ba", "be", "bo", "da", "do", "fa", "fi", "ga", "go", "ka", "ki", "ko",
                                      "la", "le", "lo", "ma", "me", "mi", "na", "ne", "no", "pa", "pe", "po",
                                      "ra", "re", "ro", "sa", "se", "so", "ta", "te", "to", "va", "vi", "zu"};

// Something that a person may like best.
struct Liking {
  const char* thing;
  const char* values[8];
};
constexpr Liking kLikings[] = {
    {"colour", {"crimson", "teal", "amber", "indigo", "ivory", "scarlet", "maroon", "turquoise"}},
    {"animal", {"otter", "badger", "falcon", "heron", "weasel", "tortoise", "lynx", "raven"}},
    {"fruit", {"quince", "apricot", "cherry", "plum", "fig", "pear", "mango", "lemon"}},
    {"flower", {"tulip", "daisy", "orchid", "marigold", "lily", "poppy", "violet", "lavender"}},
    {"drink", {"cider", "cocoa", "tea", "coffee", "lemonade", "milk", "brandy", "water"}},
    {"instrument", {"cello", "harp", "oboe", "banjo", "fiddle", "organ", "guitar", "clarinet"}},
    {"game", {"chess", "whist", "draughts", "skittles", "croquet", "marbles", "dominoes", "bowls"}}};

using Text = std::string;

Text capital(Text word) {
  if (!word.empty() && word[0] >= 'a' && word[0] <= 'z') word[0] = static_cast<char>(word[0] - 'a' + 'A');
  return word;
}
Text made_up(Random& r, uint32_t syllables) {
  Text word;
  while (syllables--) word += r.of(kSyllables);
  return capital(word);
}
Text person(Random& r) { return r.chance(0.7) ? r.of(kNames) : made_up(r, r.between(2, 3)); }
Text city(Random& r) { return r.chance(0.7) ? r.of(kCities) : made_up(r, r.between(2, 3)); }
Text digits(Random& r, uint32_t count, const char* of = "0123456789", uint32_t base = 10) {
  Text number;
  while (count--) number += of[r.below(base)];
  return number;
}
Text hexadecimal(Random& r, uint32_t count) { return digits(r, count, "0123456789abcdef", 16); }
// "a", "a and b", "a, b and c".
Text all_of(const std::vector<Text>& items) {
  Text text;
  for (size_t i = 0; i < items.size(); ++i)
    text += (i == 0 ? "" : i + 1 == items.size() ? " and " : ", ") + items[i];
  return text;
}
// `count` different items, each made by `make`.
template <typename Make>
std::vector<Text> several(uint32_t count, const Make& make) {
  std::vector<Text> items;
  while (items.size() < count) {
    Text item = make();
    if (std::find(items.begin(), items.end(), item) == items.end()) items.push_back(std::move(item));
  }
  return items;
}
Text name_of_thing(Random& r) { return Text(r.of(kAdjectives)) + "-" + r.of(kObjects); }

Fact keeping(Random& r) {
  struct Verb {
    const char *past, *asked;
  };
  constexpr Verb kVerbs[] = {
      {"keeps", "does"}, {"left", "leave"}, {"hid", "hide"}, {"found", "find"}, {"put", "put"}};
  const Text who = person(r), what = Text(r.of(kAdjectives)) + " " + r.of(kObjects), where = r.of(kPlaces);
  const uint32_t verb = r.below(5);
  const Text question = verb == 0 ? "Where does " + who + " keep the " + what + "?"
                                  : "Where did " + who + " " + kVerbs[verb].asked + " the " + what + "?";
  return {"keeping " + who + what,
          {who + " " + kVerbs[verb].past + " the " + what + " in the " + where + "."},
          question,
          "In the " + where + ".",
          {where}};
}
Fact code(Random& r) {
  constexpr const char* kCodes[] = {"access code", "door code", "safe combination", "telephone number"};
  constexpr const char* kHouses[] = {"office", "warehouse", "hotel", "bank", "embassy"};
  const Text what = Text(r.of(kCodes)) + " of the " + city(r) + " " + r.of(kHouses);
  const Text number = digits(r, r.between(4, 6));
  return {
      "code " + what, {"The " + what + " is " + number + "."}, "What is the " + what + "?", number, {number}};
}
Fact liking(Random& r) {
  const Liking& l = r.of(kLikings);
  const Text who = person(r), value = r.of(l.values), what = who + "'s favourite " + l.thing;
  return {"liking " + what,
          {what + " is " + value + "."},
          "What is " + what + "?",
          capital(value) + ".",
          {value}};
}
Fact event(Random& r) {
  const Text what = Text(r.of(kEvents)) + " in " + city(r);
  const Text weekday = r.of(kDays), day = std::to_string(r.between(1, 28)) + " " + r.of(kMonths);
  const Text when = "on " + weekday + ", " + day + ".";
  return {
      "event " + what, {"The " + what + " is " + when}, "When is the " + what + "?", capital(when), {day}};
}
Fact password(Random& r) {
  const Text of = name_of_thing(r), word = Text(r.of(kPlaces)) + "-" + r.of(kCargo) + "-" + digits(r, 3);
  return {"password " + of,
          {"The password for " + of + " is " + word + "."},
          "What is the password for " + of + "?",
          word,
          {word}};
}
Fact debt(Random& r) {
  const Text who = person(r), whom = person(r), number = std::to_string(r.between(2, 9999)),
             coins = number + " coins.";
  return {"debt " + who + whom,
          {who + " owes " + whom + " " + coins},
          "How many coins does " + who + " owe " + whom + "?",
          coins,
          {number}};
}
Fact ship(Random& r) {
  const Text name = "the ship " + made_up(r, 3), cargo = r.of(kCargo), port = city(r);
  const bool what = r.chance(0.5);
  return {name,
          {capital(name) + " carries " + cargo + " to " + port + "."},
          what ? "What does " + name + " carry?" : "Where does " + name + " go?",
          what ? capital(cargo) + "." : "To " + port + ".",
          {what ? cargo : port}};
}
Fact ticket(Random& r) {
  const Text of = name_of_thing(r), number = digits(r, 7);
  return {"ticket " + of,
          {"Whoever comes for the " + of + " must show ticket " + number + "."},
          "Which ticket must be shown for the " + of + "?",
          number,
          {number}};
}
Fact job(Random& r) {
  const Text who = person(r), where = city(r), trade = r.of(kTrades);
  const bool what = r.chance(0.5);
  return {"job " + who,
          {who + " works as a " + trade + " in " + where + "."},
          what ? "What does " + who + " do for a living?" : "In which city does " + who + " work?",
          what ? who + " is a " + trade + "." : "In " + where + ".",
          {what ? trade : where}};
}

}  // namespace

Fact make_fact(Random& r) {
  constexpr Fact (*kMakers[])(Random&) = {keeping, code, liking, event, password, debt, ship, ticket, job};
  return r.of(kMakers)(r);
}

Fact make_key(Random& r, bool sequence) {
  const Text what = sequence ? "The sequence of digits" : "The pass key";
  const Text number = digits(r, sequence ? 10 : 5),
             is = sequence ? " is the sequence of digits." : " is the pass key.";
  return {what,
          {what + " is " + number + ". Remember it. " + number + is},
          sequence ? "What is the sequence of digits?" : "What is the pass key?",
          number,
          {number}};
}

Fact make_pair(Random& r, bool hex) {
  const Text key = hex ? hexadecimal(r, 8) : name_of_thing(r) + "-" + digits(r, 2);
  const Text value = hex ? hexadecimal(r, 8) : digits(r, 5);
  return {"pair " + key,
          {"\"" + key + "\": \"" + value + "\","},
          "What is the value of \"" + key + "\"?",
          value,
          {value},
          true};
}

Fact make_values(Random& r) {
  const uint32_t count = r.between(2, 4);
  Fact fact;
  if (r.chance(0.5)) {
    const Text of = "the " + city(r) + " " + r.of(kEvents);
    fact = {"guests " + of, {}, "Who was seen at " + of + "?", "", several(count, [&] { return person(r); })};
    for (const Text& who : fact.expected) fact.sentences.push_back(who + " was seen at " + of + ".");
  } else {
    const Text of = city(r) + " to " + city(r);
    fact = {"trains " + of, {}, "Which trains run from " + of + "?", "", several(count, [&] {
              return digits(r, 4, "123456789", 9);
            })};
    for (const Text& number : fact.expected)
      fact.sentences.push_back("Train " + number + " runs from " + of + ".");
  }
  fact.answer = all_of(fact.expected) + ".";
  return fact;
}

Fact make_chain(Random& r) {
  struct Form {
    const char *before, *between, *after;
    bool upper;
  };
  constexpr Form kForms[] = {
      {"let ", " = ", ";", false}, {"Then ", " is given the value of ", ".", true}, {"", " := ", "", false}};
  const Form& form = r.of(kForms);
  const Text value = digits(r, 5, "123456789", 9);
  const std::vector<Text> names = several(r.between(3, 5), [&] {
    Text name = made_up(r, 3);
    for (char& c : name)
      if (form.upper ? c >= 'a' && c <= 'z' : c >= 'A' && c <= 'Z') c ^= 'a' ^ 'A';
    return name;
  });
  Fact fact{"chain " + value, {}, "Which variables hold the value " + value + "?", all_of(names) + ".", {}};
  for (size_t i = 0; i < names.size(); ++i)
    fact.sentences.push_back(form.before + names[i] + form.between + (i ? names[i - 1] : value) + form.after);
  return fact;
}

// Each of the words that are asked for occurs more often than the next. The last of them occurs at least
// three times as often as any other word.
Fact make_count(Random& r, uint32_t words) {
  constexpr uint32_t kRare = 8, kTimes = 3;
  const Liking& liking = r.of(kLikings);
  std::vector<Text> others(std::begin(kCargo), std::end(kCargo));
  r.shuffle(others);
  others.resize(kRare);
  const std::vector<Text> asked = several(r.between(1, 3), [&]() -> Text { return r.of(liking.values); });
  std::erase_if(others,
                [&](const Text& word) { return std::find(asked.begin(), asked.end(), word) != asked.end(); });
  // A round contains 3 of each word that is asked for, and 1 of each other word.
  const auto of_round = static_cast<uint32_t>(kTimes * asked.size() + others.size());
  const uint32_t rounds = std::max(1u, words / of_round);
  std::vector<Text> list;
  for (uint32_t i = 0; i < asked.size(); ++i)
    list.insert(list.end(), kTimes * rounds + static_cast<uint32_t>(asked.size()) - 1 - i, asked[i]);
  for (const Text& word : others) list.insert(list.end(), rounds, word);
  r.shuffle(list);
  const Text of = "the counter of " + city(r);
  Text sentence = "Called out at " + of + ":";
  for (size_t i = 0; i < list.size(); ++i) sentence += (i ? ", " : " ") + list[i];
  const Text number = asked.size() == 1   ? "word was"
                      : asked.size() == 2 ? "two words were"
                                          : "three words were";
  return {"count " + of,
          {sentence + "."},
          "Which " + number + " called out most often at " + of + "?",
          capital(all_of(asked)) + ".",
          {}};
}

Fact make_code(Random& r, uint32_t language) {
  constexpr const char* kVerbs[] = {"load",  "parse",  "flush", "merge", "reset", "render",
                                    "queue", "verify", "mount", "trim",  "sort",  "fetch"};
  const bool word = r.chance(0.4), constant = r.chance(0.3);
  const Text verb = r.of(kVerbs), object = r.of(kObjects);
  const Text value =
      word ? Text(r.of(kPlaces)) + "_" + r.of(kCargo) : digits(r, r.between(3, 5), "123456789", 9);
  const Text quoted = word ? "\"" + value + "\"" : value, type = word ? "const char*" : "int";
  Text name = verb + (language == 2 ? capital(object) : "_" + object), line;
  if (constant) {
    name = verb + "_" + object;
    for (char& c : name)
      if (c >= 'a' && c <= 'z') c ^= 'a' ^ 'A';
    const Text is = name + " = " + quoted;
    const Text forms[kLanguages] = {is, "static " + type + " " + is + ";", "const " + is + ";"};
    line = forms[language];
  } else {
    const Text forms[kLanguages] = {"def " + name + "():\n    return " + quoted,
                                    type + " " + name + "(void) {\n  return " + quoted + ";\n}",
                                    "function " + name + "() {\n  return " + quoted + ";\n}"};
    line = forms[language];
  }
  return {
      "code " + name,
      {line + "\n"},
      constant ? "What is the constant " + name + " set to?" : "What does the function " + name + " return?",
      value,
      {value},
      true};
}

std::string make_introduction(Random& r) {
  constexpr const char* kIntroductions[] = {
      "Read the text and answer the questions.",
      "There is important information hidden inside a long text. Find it and remember it.",
      "Here is a document.", "Please read this carefully.", ""};
  return r.of(kIntroductions);
}

}  // namespace thimble

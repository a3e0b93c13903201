//! Just enough JSON to read what the tests' own scripts write; panics on anything else.
use std::collections::BTreeMap;

#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    Null,
    Bool(bool),
    Whole(i64),
    Real(f64),
    Text(String),
    List(Vec<Json>),
    Object(BTreeMap<String, Json>),
}

#[allow(dead_code)] // each test file uses some
impl Json {
    pub fn parse(text: &str) -> Json {
        let mut reader = Reader { rest: text.trim_end() };
        let value = reader.value();
        assert_eq!(reader.rest, "");
        value
    }

    pub fn get(&self, name: &str) -> Option<&Json> {
        match self {
            Json::Object(fields) => fields.get(name),
            other => panic!("no object: {:?}", other),
        }
    }

    pub fn text(&self, name: &str) -> &str {
        match self.get(name) {
            Some(Json::Text(text)) => text,
            other => panic!("{} is not a text: {:?}", name, other),
        }
    }

    pub fn whole(&self, name: &str) -> i64 {
        match self.get(name) {
            Some(Json::Whole(number)) => *number,
            other => panic!("{} is not a whole number: {:?}", name, other),
        }
    }

    pub fn real(&self, name: &str) -> f64 {
        match self.get(name) {
            Some(Json::Real(number)) => *number,
            _ => self.whole(name) as f64,
        }
    }

    /// False where there is none.
    pub fn flag(&self, name: &str) -> bool {
        matches!(self.get(name), Some(Json::Bool(true)))
    }

    pub fn list(&self, name: &str) -> &[Json] {
        match self.get(name) {
            Some(Json::List(items)) => items,
            other => panic!("{} is not a list: {:?}", name, other),
        }
    }
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    fn take(&mut self, token: &str) -> bool {
        self.rest = self.rest.trim_start();
        match self.rest.strip_prefix(token) {
            Some(rest) => self.rest = rest,
            None => return false,
        }
        true
    }

    fn value(&mut self) -> Json {
        if self.take("{") {
            Json::Object(self.items("}", |reader| {
                let name = reader.string();
                assert!(reader.take(":"));
                (name, reader.value())
            }))
        } else if self.take("[") {
            Json::List(self.items("]", Self::value))
        } else if self.take("null") {
            Json::Null
        } else if self.take("true") {
            Json::Bool(true)
        } else if self.take("false") {
            Json::Bool(false)
        } else if self.rest.starts_with('"') {
            Json::Text(self.string())
        } else {
            self.number()
        }
    }

    fn items<T, C: FromIterator<T>>(&mut self, end: &str, item: impl Fn(&mut Self) -> T) -> C {
        let mut items = Vec::new();
        if !self.take(end) {
            loop {
                items.push(item(self));
                if !self.take(",") {
                    break;
                }
            }
            assert!(self.take(end));
        }
        items.into_iter().collect()
    }

    fn number(&mut self) -> Json {
        let end = self.rest.find(|c: char| !"+-.eE0123456789".contains(c)).unwrap_or(self.rest.len());
        let (number, rest) = self.rest.split_at(end);
        self.rest = rest;
        number.parse().map_or_else(|_| Json::Real(number.parse().expect("a number")), Json::Whole)
    }

    fn string(&mut self) -> String {
        assert!(self.take("\""));
        let mut text = String::new();
        let mut chars = self.rest.chars();
        loop {
            match chars.next().expect("the string ends") {
                '"' => break,
                '\\' => match chars.next().expect("the escape ends") {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'u' => {
                        let digits: String = chars.by_ref().take(4).collect();
                        let code = u32::from_str_radix(&digits, 16).expect("hexadecimal digits");
                        text.push(char::from_u32(code).expect("no surrogates in our scripts"));
                    }
                    c if "\"\\/".contains(c) => text.push(c),
                    c => panic!("escape {}", c),
                },
                c => text.push(c),
            }
        }
        self.rest = chars.as_str();
        text
    }
}

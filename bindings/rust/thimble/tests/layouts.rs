//! What thimble-sys declares is what the C compiler makes of the header: $THIMBLE_LAYOUTS is what layouts.py wrote.
mod json;

use json::Json;
use thimble::sys;

fn layouts() -> Json {
    let path = std::env::var("THIMBLE_LAYOUTS").expect("THIMBLE_LAYOUTS is set");
    Json::parse(&std::fs::read_to_string(path).expect("it can be read"))
}

fn whole(number: usize) -> Json {
    Json::Whole(number as i64)
}

#[test]
fn structs_are_the_headers() {
    let ours = sys::layouts().into_iter().map(|(name, size, fields)| {
        let fields = fields
            .into_iter()
            .map(|(field, offset, size)| (field.to_string(), Json::List(vec![whole(offset), whole(size)])))
            .collect();
        let layout = [("size".to_string(), whole(size)), ("fields".to_string(), Json::Object(fields))];
        (name.to_string(), Json::Object(layout.into_iter().collect()))
    });
    assert_eq!(Some(&Json::Object(ours.collect())), layouts().get("structs"));
}

#[test]
fn constants_and_functions_are_the_headers() {
    let constants = sys::CONSTANTS.iter().map(|&(name, value)| (name.to_string(), Json::Whole(value)));
    assert_eq!(Some(&Json::Object(constants.collect())), layouts().get("constants"));
    let mut ours: Vec<Json> = sys::FUNCTIONS.iter().map(|&name| Json::Text(name.to_string())).collect();
    let mut theirs = layouts().list("functions").to_vec();
    let name = |function: &Json| format!("{:?}", function);
    ours.sort_by_key(name);
    theirs.sort_by_key(name);
    assert_eq!(ours, theirs);
}

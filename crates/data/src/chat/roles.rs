//! What records call those who speak, and what chat templates call them.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use regex::Regex;

/// Common names, and the roles that chat templates know.
pub(crate) const ROLES: [(&str, &str); 12] = [
    ("system", "system"),
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("assistant", "assistant"),
    ("ai", "assistant"),
    ("model", "assistant"),
    ("bot", "assistant"),
    ("chatgpt", "assistant"),
    ("bing", "assistant"),
    ("bard", "assistant"),
    ("tool", "tool"),
];

/// Roles of some families of models, which other templates print as they are.
pub(super) const MORE_ROLES: [&str; 3] = ["developer", "function", "ipython"];

/// The role that a common name stands for, in small or capital letters.
pub(crate) fn common_role(name: &str) -> Option<&'static str> {
    let role = ROLES
        .iter()
        .find(|(known, _)| known.eq_ignore_ascii_case(name));
    role.map(|(_, role)| *role)
}

/// Tests of a role: the first group has the names.
static TESTS_OF_ROLES: LazyLock<Vec<Regex>> = LazyLock::new(|| {
    let tests = [
        // `message['role'] == 'user'`, `role | lower != "user"`
        r#"role['"]?\s*\]?\)?(?:\s*\|\s*\w+)*\s*[=!]=\s*('[^']*'|"[^"]*")"#,
        // `'user' == message.role`
        r#"('[^']*'|"[^"]*")\s*[=!]=\s*[^\s=%}]*role\b"#,
        // `message.role not in ['user', 'tool']`
        r#"role['"]?\s*\]?\)?(?:\s*\|\s*\w+)*\s+(?:not\s+)?in\s*[\[({]([^\])}]*)"#,
        // `selectattr('role', 'equalto', 'user')`
        r#"attr\(\s*['"]role['"]\s*,\s*['"](?:equalto|eq|==|ne|!=|in)['"]\s*,([^)]*)"#,
    ];
    tests
        .iter()
        .filter_map(|test| Regex::new(test).ok())
        .collect()
});

static QUOTED: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r#"'([^']+)'|"([^"]+)""#).ok());

/// The names with which templates compare roles.
pub(super) fn compared_roles<'a>(templates: impl Iterator<Item = &'a str>) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for template in templates {
        let tests = TESTS_OF_ROLES
            .iter()
            .flat_map(|test| test.captures_iter(template));
        let lists = tests.filter_map(|test| Some(test.get(1)?.as_str()));
        for list in lists {
            let quoted = QUOTED.iter().flat_map(|quoted| quoted.find_iter(list));
            names.extend(quoted.map(|name| name.as_str().trim_matches(['\'', '"']).to_string()));
        }
    }
    names
}
